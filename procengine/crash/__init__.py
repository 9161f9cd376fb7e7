"""What a group was doing when a process of it died, in a file, and how to run it again.

`record` is what is in the file, `writer` and `files` put it there, `replay` reads and compares.
"""
