"""Serialisation of nested values, such as the `state_dict()` of an optimizer: a line of JSON, then the tensors in safetensors format."""

import json
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ..errors import TaskError


def pack(value: Any) -> bytes:
    """Serialise nested dicts, lists and tuples of tensors, numbers and strings to bytes. Raises TaskError for unsupported types."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_tree(value, tensors), separators=(",", ":"))
    return tree.encode() + b"\n" + save_tensors(tensors)


def check(value: Any) -> None:
    """Raise TaskError for a value that `pack` cannot serialise."""
    if isinstance(value, dict):
        check([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            check(part)
    elif not isinstance(value, Tensor | bool | int | float | str | None):
        raise TaskError(
            f"the state that a client keeps between rounds contains a {type(value).__name__}; in local_round.state and in the optimizer, "
            "store only tensors, numbers, strings, and dicts and lists of them"
        )


def unpack(packed: bytes) -> Any:
    """Return the value that `pack` serialised as `packed`. Raises ValueError, KeyError or TypeError for malformed bytes."""
    tree, _, tensors = packed.partition(b"\n")
    return _value(json.loads(tree), load_tensors(tensors))


def _tree(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_tree(k, tensors), _tree(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_tree(part, tensors) for part in value]}
    check(value)
    return value


def _value(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_value(key, tensors): _value(value, tensors) for key, value in content}
    parts = [_value(part, tensors) for part in content]
    return parts if kind == "list" else tuple(parts)
