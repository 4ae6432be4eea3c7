"""A change to another package that is made once, however often it is asked for, and undone; and the
entropy alone, which the packages ask for."""

import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import Tensor

import detlogp

Undo = Callable[[], None]


class Patch:
    """What `enable()` returns: undo it by `undo()`, or use it as a context manager.

    The change holds until every Patch of one framework is undone, in any order.
    """

    def __init__(self, release: Undo) -> None:
        self._release: Undo | None = release

    def undo(self) -> None:
        """Takes the change back; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


class Patcher:
    """Counts who asks for a change; `apply` makes it, or raises, and returns what undoes it."""

    def __init__(self, apply: Callable[[], Undo]) -> None:
        self._apply = apply
        self._undo: Undo | None = None
        self._holders = 0

    def enable(self) -> Patch:
        if self._undo is None:
            self._undo = self._apply()
        self._holders += 1
        return Patch(self._release)

    def _release(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self._undo is not None:
            undo, self._undo = self._undo, None
            undo()


def exchange(package: str, pairs: Sequence[tuple[Any, Any]]) -> Undo:
    """Puts the second of each pair wherever a loaded module of the package holds the first.

    Undoing looks again, so that modules imported in the meantime get the original too. For that,
    no object may stand in for two.
    """
    assert len({id(new) for _, new in pairs}) == len(pairs)

    def replace(pairs: Sequence[tuple[Any, Any]]) -> None:
        for name, module in list(sys.modules.items()):
            if name != package and not name.startswith(package + "."):
                continue
            for attribute, value in list(vars(module).items()):
                for old, new in pairs:
                    if value is old:
                        setattr(module, attribute, new)

    replace(pairs)
    return lambda: replace([(new, old) for old, new in pairs])


def entropy_of(logits: Tensor) -> Tensor:
    """[...], the entropy of each row of logits [..., V]; float64 for float64, otherwise float32."""
    # Any column will do for an id.
    ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return detlogp.logp(logits, ids, return_entropy=True).entropy


def check_parameters(where: str, function: Any, expected: tuple[str, ...]) -> None:
    """Raises RuntimeError unless the function takes exactly these parameters, in this order."""
    got = None if function is None else tuple(inspect.signature(function).parameters)
    if got != expected:
        said = "no such function" if got is None else f"({', '.join(got)})"
        raise RuntimeError(
            f"{where}: expected a function of ({', '.join(expected)}), found {said}; detlogp does "
            "not know this version's internals, and has changed nothing"
        )


def refers_to(function: Any, name: str) -> bool:
    """Whether the function's code, or that of one defined inside it, reads this global name."""

    def search(code: CodeType) -> bool:
        inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
        return name in code.co_names or any(search(constant) for constant in inner)

    code = getattr(function, "__code__", None)
    return code is not None and search(code)
