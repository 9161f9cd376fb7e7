"""The resolved configuration: frozen values, made once by `resolve.resolve()` and handed to every process.

Owns: the shape of the configuration. Never does: read the environment, guess, or change a value.
Nothing here says "auto": by the time an `EngineConfig` exists, every field is a fact.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

__all__ = [
    "ApiConfig",
    "AttentionBackend",
    "CacheConfig",
    "CrashConfig",
    "DecoderConfig",
    "Device",
    "EncoderConfig",
    "EngineConfig",
    "ExpertsConfig",
    "GroupConfig",
    "HeadConfig",
    "Kernels",
    "LimitsConfig",
    "ListenConfig",
    "LoraConfig",
    "LoraModule",
    "MetricsConfig",
    "ModelConfig",
    "ProfilingConfig",
    "Quantization",
    "RopeScaling",
    "SchedulerConfig",
    "WorkerConfig",
]

Device = Literal["cpu", "cuda", "mock"]
DType = Literal["float32", "bfloat16", "float16"]
KVCacheDType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
ToolCallStyle = Literal["none", "hermes", "llama3", "mistral"]
# Of weights; stored: as the file has them; int14: near to floats, of encoders alone (kernels/native/encoder.h).
Quantization = Literal["none", "stored", "int14", "int8", "int4", "fp8"]
Pooling = Literal["last", "mean", "cls"]
Kernels = Literal["torch", "native"]
AttentionBackend = Literal["auto", "torch", "triton", "flash_attn"]


class RopeScaling(Struct, frozen=True, forbid_unknown_fields=True):
    """How rotary frequencies are stretched beyond the trained context (`rope_scaling` of a Hugging Face config)."""

    kind: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: cos/sin multiplier; None means 0.1 ln(factor) + 1 (yarn)
    truncate: bool = True  # yarn: whether the correction range is rounded to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, within the trained context
    long_factors: tuple[float, ...] = ()  # and beyond it
    is_long: bool = False  # longrope: which of the two; of a group that serves longer sequences, for all of them


class ExpertsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers whose MLP is many small ones, of which each token takes the few that a router scores best."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of each
    renormalize: bool  # whether the weights of the experts taken add up to 1
    shared_intermediate_size: int = 0  # of one that all tokens take, by a gate of its own; 0: there is none
    layers: tuple[int, ...] = ()  # that have experts; the others have one plain MLP


class DecoderConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a decoder departs from the Llama family; the defaults say that it does not."""

    norms: Literal["pre", "post", "both"] = "pre"  # of attention and MLP: of what goes in, what comes out, or both
    norm_offset: float = 0.0  # what the checkpoint's norm weights lack
    qk_norm_is_whole: bool = False  # queries and keys are normalised over all heads at once
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gate
    rotary_dim: int | None = None  # dimensions of a head that turn, the first ones; None: all
    local_rope_theta: float | None = None  # of layers with a sliding window, which then have no scaling
    plain_layers: tuple[int, ...] = ()  # without rotary positions
    global_layers: tuple[int, ...] = ()  # without the sliding window
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0
    experts: ExpertsConfig | None = None
    is_causal: bool = True  # False: tokens see those behind them too, so it embeds and does not generate


class EncoderConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What a bidirectional encoder has that decoders do not."""

    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    is_gated: bool = False  # act(first half) * second half
    is_pre_norm: bool = False
    norm_eps: float = 1e-12
    num_positions: int = 0  # rows of a table of learned positions; 0: rotary ones
    position_offset: int = 0  # the row of a sequence's first token
    num_token_types: int = 0
    global_every: int = 1  # every n-th layer, the first among them, attends to all tokens
    local_window: int = -1  # in the others, a token sees those at most so far away
    local_rope_theta: float = 10000.0


class HeadConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What makes logits of labels from hidden states."""

    labels: tuple[str, ...]
    activation: Literal["softmax", "sigmoid", "identity"]  # from logits to scores
    pooling: Pooling = "cls"
    level: Literal["sequence", "token"] = "sequence"  # what has labels: a text, or each of its tokens
    has_bias: bool = True


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Facts read from a model's files. Counts are per whole model; `head_dim` may differ from hidden_size/num_heads."""

    name: str  # what the user asked for
    path: str  # a Hugging Face folder or a .gguf file; "" for a model that has no weights (mock)
    format: Literal["safetensors", "gguf"]
    architecture: Literal[
        "llama", "mistral", "qwen2", "qwen3",
        "phi3", "olmo2", "granite", "smollm3", "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt2",
        "transformers",  # another decoder, which runs on the modules of the package of that name
        "bert", "roberta", "xlm-roberta", "modernbert",
    ]  # fmt: skip
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_path: str = ""  # a tokenizer.json for the `tokenizers` library
    chat_template: str | None = None  # Jinja source
    chat_bos_token: str = ""  # what `bos_token` / `eos_token` mean inside the template
    chat_eos_token: str = ""
    weights_dtype: DType = "bfloat16"  # what the files hold (or, for quantised ones, decode to without loss of note)
    pooling: Pooling = "last"  # how `embed` reduces hidden states
    workflows: tuple[str, ...] = ("generate", "embed", "hidden_states", "score_text")
    tool_call_parser: ToolCallStyle = "none"  # how the model writes tool calls
    normalize: bool = True  # whether `embed` gives vectors of length 1
    prompts: dict[str, str] = {}  # by name: what goes before a text that is embedded
    default_prompt: str | None = None  # the name of the one that texts without a name get
    max_seq_length: int | None = None  # tokens of a sequence, unless asked for otherwise
    encoder: EncoderConfig | None = None  # None: a decoder
    head: HeadConfig | None = None
    score_token_ids: tuple[int, ...] = ()  # of a reranker without labels: yes, and no where that counts too
    pair_template: str | None = None  # how `score` writes two texts as one prompt: with {query} and {document}
    sparse_linear: str = ""  # files of linear layers behind an encoder (bge-m3): lexical weights of tokens
    colbert_linear: str = ""  # and a vector for each; "": there is none
    decoder: DecoderConfig = DecoderConfig()


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The paged KV cache of each worker."""

    block_size: int = 16  # tokens
    num_blocks: int | None = None  # None: the worker measures what fits `memory_bytes` and says so in WorkerReady
    memory_bytes: int | None = 1 << 30  # None: what a GPU has left, up to `gpu_memory_utilization` of all it has
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker may have running, and how far ahead of it the frontend plans."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_mixed_tokens: int | None = None  # of prompts beside rows that decode, and wait for them
    max_overtaken_tokens: int = 4096  # of later prompts that may go before a longer one; 0: in order of arrival
    max_embed_tokens: int = 2048  # of one sequence that is not cut, of `embed` say: it may fill a step alone
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_depth: int = 2
    decode_steps: int = 1
    num_speculative_tokens: int = 0


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The device processes."""

    device: Device = "cpu"
    dtype: DType = "float32"
    kv_cache_dtype: KVCacheDType = "float32"
    quantization: Quantization = "none"
    kernels: Kernels = "torch"
    attention_backend: AttentionBackend = "auto"  # of the torch kernels; the worker says what auto became
    uses_graphs: bool = False  # decode steps are captured as graphs, one for each of a few batch sizes
    num_workers: int = 1
    threads: int = 1  # CPU threads of one worker
    mock_step_ms: float = 0.0
    logits_processors: tuple[str, ...] = ()  # "module:callable", see docs/PLUGINS.md


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds that keep one client from taking the group down."""

    max_queued_requests: int = 8192
    max_queued_tokens: int = 1 << 22  # of prompts that wait for their first step
    max_clients: int = 4096
    max_client_requests: int = 8192
    max_client_bytes: int = 64 << 20  # that one client has not read
    max_unsent_bytes: int = 1 << 30  # that all clients together have not read
    request_timeout_s: float | None = None  # of requests that say none themselves
    queue_timeout_s: float | None = None  # until a request's first step
    max_request_bytes: int = 4 << 20
    max_stop_strings: int = 16
    max_stop_bytes: int = 4096
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_n: int = 128
    max_bad_words: int = 128
    max_logit_bias: int = 1024
    max_grammar_bytes: int = 65536
    grammar_timeout_s: float = 10.0
    template_timeout_s: float = 5.0


class ProfilingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes note about themselves."""

    span_records: int = 1 << 14  # that each thread keeps, a power of two; 0: none
    nvtx: bool = False  # ranges for Nsight Systems in workers on a GPU


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the group tells the outside about itself, through a process that is there only if something is on."""

    port: int | None = None  # of Prometheus metrics over HTTP; 0: any that is free, None: none
    host: str = "127.0.0.1"
    otlp_endpoint: str | None = None  # URL that takes OTLP/HTTP traces; None: none are sent
    uds: str | None = None  # a Unix socket that serves the same pages, for the group's own HTTP processes

    @property
    def is_on(self) -> bool:
        """Whether the process is wanted."""
        return self.port is not None or self.otlp_endpoint is not None or self.uds is not None


class ApiConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP front door: processes that are there only if it has an address."""

    port: int | None = None  # 0: any that is free, None: none
    host: str = "127.0.0.1"
    uds: str | None = None  # a Unix socket instead of a port
    num_workers: int = 1  # processes that accept on the same address
    api_keys: tuple[str, ...] = ()  # any of them opens every route; none: all are open
    served_model_names: tuple[str, ...] = ()  # what requests call the model; the first is what answers call it
    allowed_origins: tuple[str, ...] = ()  # of pages whose scripts may ask (CORS); "*": all
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    @property
    def is_on(self) -> bool:
        """Whether the processes are wanted."""
        return self.port is not None or self.uds is not None


class ListenConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where clients of other machines connect, beside the Unix sockets. Secret keys are in a file, never in a value."""

    frontend: str  # tcp://HOST:PORT; the supervisor puts in what port 0 became
    output: str
    curve_keys: str | None = None  # path of the server file; None: without keys, on the loopback interface only


class CrashConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is written down when a process dies."""

    dir: str
    seconds: float = 30.0  # of steps; 0: nothing is written
    max_records: int = 8  # files in the directory, of all groups
    redact_prompts: bool = False


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the group lives and how it ends."""

    name: str
    run_dir: str
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 10.0
    max_restarts: int = 5  # of one child, within this time
    restart_window_s: float = 60.0
    step_timeout_s: float = 300.0  # without progress, after which a worker with steps to run counts as hung
    instance: int = 0  # its supervisor's; the next group of this name has another. 0: no supervisor has it yet


class LoraModule(Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter of the model: requests name it, its weights are in a PEFT folder."""

    name: str
    path: str


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Low-rank adapters. The supervisor tells successors of those that were loaded and unloaded meanwhile."""

    max_loras: int = 0  # that are loaded at once; 0: adapters are off
    max_rank: int = 16
    modules: tuple[LoraModule, ...] = ()
    allows_http: bool = False  # to load and unload them; who runs the group always may

    @property
    def is_on(self) -> bool:
        """Whether there may be adapters."""
        return self.max_loras > 0


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a process of the group needs to know. One value, the same in all of them."""

    model: ModelConfig
    group: GroupConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    limits: LimitsConfig = LimitsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    metrics: MetricsConfig = MetricsConfig()
    api: ApiConfig = ApiConfig()
    crash: CrashConfig = CrashConfig("", 0.0)
    lora: LoraConfig = LoraConfig()
    listen: ListenConfig | None = None  # None: clients connect to Unix sockets only
