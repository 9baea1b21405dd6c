"""The KV cache as the engine sees it: which sequence owns which cell."""

from minfer.kv.store import CellStore, Rows

__all__ = ["CellStore", "Rows"]
