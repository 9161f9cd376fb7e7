"""The frontend's view of a worker's paged KV cache: which block belongs to whom. The tensors are the worker's."""
