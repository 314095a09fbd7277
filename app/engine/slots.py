"""Weight slots: the fixed memory that versions of a model take turns in (RecoGEM 3.3).

A live server reads a new version into a slot that nobody uses, beside the one that serves. Slots are written over and
over, so loading allocates nothing and retiring frees nothing, and addresses stay: what is captured over a slot (a CUDA
graph) stays valid for every version that lives there. A slot comes back when the last reference to it has gone, and not
before: whoever computes with an engine holds its slot.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.families.base import Family
from app.engine.placing import Target
from app.errors import Fault, Rejected
from app.ops.fp8 import FP8


class Layout(NamedTuple):
    """What a slot holds: parameters by name and shape, of one dtype on one device; those in `eight` as float8_e4m3fn,
    with float32 scales of their rows as "<name>.scale"."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: torch.dtype
    device: torch.device
    eight: frozenset[str] = frozenset()

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Everything that is allocated: name, shape, dtype."""
        for name, shape in self.shapes:
            if name in self.eight:
                yield name, shape, FP8
                yield f"{name}.scale", shape[:1], torch.float32
            else:
                yield name, shape, self.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.tensors())


class Bound(NamedTuple):
    """A module whose parameters are a slot's memory. Versions that differ in nothing but their tensors' values take
    turns in it, too: to make it anew costs the batches as much of the interpreter as all else of a load.

    made_from  equal where the same module would be made · targets: where the tensors of a version go, by name
    """

    made_from: object
    layout: Layout
    module: Family
    targets: Mapping[str, Sequence[Target]]


@dataclass(slots=True, eq=False)
class _Memory:
    number: int
    layout: Layout
    tensors: Mapping[str, Tensor]
    bound: Bound | None = None

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Slot:
    """Lent memory: `tensors` by parameter name. It goes back to its `slots` when this object dies, or by `release`.

    number  the same for the same addresses, from 0 · layout: what it was taken for
    """

    def __init__(self, slots: Slots, memory: _Memory) -> None:
        self.slots, self.number, self.tensors = slots, memory.number, memory.tensors
        self.layout, self._memory = memory.layout, memory
        self.device = memory.layout.device
        self._release = weakref.finalize(self, slots.give_back, memory)
        self._release.atexit = False

    def keep(self, bound: Bound) -> None:
        """This is what its memory is made a module of, for whoever has the slot next."""
        self._memory.bound = bound

    def release(self) -> None:
        """Give the memory back now: a load has failed."""
        self._release()


class Slots:
    """The slots of one server. One thread takes; any thread may let go (every step of it is one atomic operation).

    most    slots that there may be; None = as many as are asked for (before a server's limits are known)
    beside  bytes that a slot takes beside its tensors once it is computed with (captured steps), as far as is known:
            what the last new one took
    """

    def __init__(self, most: int | None = None) -> None:
        self.most, self.beside = most, 0
        self._free: deque[_Memory] = deque()
        self._lent: set[int] = set()

    @property
    def lent(self) -> int:
        """Slots in use."""
        return len(self._lent)

    @property
    def full(self) -> bool:
        """Whether every slot that there may be is in use."""
        return self.most is not None and self.lent >= self.most

    @property
    def new_bytes(self) -> int:
        """What the next `take` is followed by beside its tensors: `beside`, or nothing where a slot is used again."""
        return 0 if self._free else self.beside

    @property
    def free_bytes(self) -> int:
        """Memory that the next `take` uses again, or gives back before it allocates."""
        return sum(memory.size for memory in tuple(self._free))

    def bound(self, made_from: object) -> Bound | None:
        """What a free slot is bound to, where that was made from the same. For the next `take`."""
        found = (memory.bound for memory in tuple(self._free))
        return next((one for one in found if one is not None and one.made_from == made_from), None)

    def take(self, layout: Layout, bound: Bound | None = None) -> Slot:
        """A free slot of a layout, allocated where there is none; its content is whatever was there.

        bound: the slot of this, of `bound`. Free slots of other layouts are given up: they belonged to another
        contract. Raises Rejected("no_slot" | "no_memory").
        """
        if self.full:
            raise Rejected("no_slot", f"all {self.most} weight slots are in use")
        free = [self._free.popleft() for _ in range(len(self._free))]
        fitting = [memory for memory in free if memory.layout == layout]
        fitting.sort(key=lambda memory: bound is not None and memory.bound is not bound)
        room = len(fitting) if self.most is None else max(1, self.most - self.lent)
        self._free.extend(fitting[1:room])
        memory = fitting[0] if fitting else None
        del free, fitting
        if bound is not None and (memory is None or memory.bound is not bound):
            raise Fault("the slot of a module is not free")
        return self._lend(memory or self._allocate(layout))

    def _lend(self, memory: _Memory) -> Slot:
        self._lent.add(memory.number)
        return Slot(self, memory)

    def give_back(self, memory: _Memory) -> None:
        """Nobody uses a slot any more."""
        self._free.append(memory)
        self._lent.discard(memory.number)

    def _allocate(self, layout: Layout) -> _Memory:
        taken = {*self._lent, *(memory.number for memory in self._free)}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        tensors: dict[str, Tensor] = {}
        for name, shape, dtype in layout.tensors():
            try:
                with torch.inference_mode(mode=False):
                    tensors[name] = torch.empty(shape, dtype=dtype, device=layout.device)
            except (MemoryError, RuntimeError) as error:
                raise Rejected("no_memory", f"no memory for `{name}` {list(shape)}: {error}") from error
        return _Memory(number, layout, tensors)
