# What a type checker sees of transformers: anything. Its own source has few types; to infer them pyright reads most of
# it, for 40 s and 2 GB. What comes out of transformers is given a type where it is received.
from typing import Any

def __getattr__(name: str) -> Any: ...
