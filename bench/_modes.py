"""RecoGEM's one plan for all steps (4.2), as peers of the step plans: batch x width rows at every step, prefixes of L
positions of which the later ones are masked, the largest C and K. The same weights, contexts, catalogue and survivors.

homogeneous  our operators
general      torch's: scaled_dot_product_attention over gathered prefixes, log_softmax, a dense mask, one flat topk
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from app.core import StepOutput, Survivors
from app.engine.captures import Recorded
from app.engine.cuda_graphs import CudaRecorder
from app.engine.families.onerec import Block, Feed, OneRec
from app.engine.fp8 import normed_for
from app.ops.attention import context_attention, prefix_attention
from app.ops.download import Download
from app.ops.trie import dense
from app.runtime.contexts import batch_inputs
from app.runtime.final import rank_items
from app.runtime.flight import Pause
from app.runtime.job import Batch, Served
from app.runtime.laps import Laps
from app.runtime.metrics import Metrics
from app.runtime.selection import Selection
from app.runtime.snapshot import Snapshot
from app.runtime.state import Ancestry, BatchState, Finalists
from app.runtime.steps import StepLoop

MODES = ("homogeneous", "general")


class OnePlan(StepLoop):
    """Batches of `requests` full contexts under one plan; `graphs` of its steps on a GPU. Every request is of the
    snapshot's only policy, which normalises over the step's codes and masks by the trie."""

    def __init__(self, mode: str, snapshot: Snapshot, requests: int, metrics: Metrics) -> None:
        super().__init__(time.monotonic, metrics)
        self.snapshot, self.general = snapshot, mode == "general"
        engine, contract = snapshot.engine, snapshot.contract
        family = engine._family  # noqa: SLF001  another way through the same weights
        assert isinstance(family, OneRec)
        self.family, self.device = family, engine.device
        self.width, self.steps, self.sizes = contract.limits.widest, len(contract.sizes), contract.sizes
        self.arena = engine.new_arena(contract.limits)
        self.requests, rows = requests, requests * self.width
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self.codes, self.ancestry = torch.zeros(rows, **ints), torch.zeros(rows, self.steps - 1, **ints)
        self.row_start = torch.arange(0, rows + 1, self.width, **ints)
        later = torch.arange(self.steps - 1, device=self.device)
        self.bias = [
            torch.cat([torch.where(later < t - 1, 0.0, -torch.inf), later.new_zeros(1).float()]).expand(
                family.config.heads, -1
            ).contiguous()
            for t in range(1, self.steps + 1)
        ]  # fmt: skip
        self.graphs: list[Recorded] = []
        if self.device.type == "cuda":
            recorder = CudaRecorder(self.device)
            self.graphs = [
                recorder.record(lambda t=t: StepOutput(self.decode(t), None, {}), fresh=True)
                for t in range(1, self.steps + 1)
            ]
            recorder.end(fresh=True)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Iterator[Served | Pause]:
        """See `StepLoop.run`; nobody leaves early, and nothing fails."""
        jobs, snapshot = batch.jobs, self.snapshot
        laps = Laps(self.device, time.monotonic)
        laps.mark()
        state = self._rectangle()
        selection = Selection(jobs, snapshot.trie, self.sizes, self.device)
        inputs = batch_inputs(snapshot.engine.input_specs(), [job.inputs for job in jobs], self.device)
        snapshot.engine.encode(inputs, self.arena)
        laps.mark()
        laps.mark()
        counts = [torch.zeros(2 * len(jobs) + 1, dtype=torch.int64, device=self.device)]
        for t in range(1, self.steps + 1):
            rows = state.rows(full=False)
            self.codes.copy_(rows.codes)
            self.ancestry[:, : t - 1].copy_(rows.ancestry)
            output = self._output(t)
            if self.general:
                survivors = self._flat(t, output.logits, state)
            else:
                found = selection.select(t, output, state, [self.width] * self.requests)
                survivors = found.survivors
                counts.append(found.counts)
            state.advance(t, survivors, tuple(range(0, len(self.codes) + 1, self.width)))
            laps.mark()
        ends = Download((torch.stack(counts[-self.steps :]), *state.survivors))
        yield Pause.LAUNCHED
        laps.wait_for_last()
        yield Pause.LAST
        counted, *found_rows = ends.wait()
        self._timed(laps)
        assert not self._broken(counted, self.sizes[: len(counted)])
        ranked = rank_items(jobs, Finalists(state.row_start, *found_rows), snapshot.vocab, self.steps)
        yield from (Served(job, one, 0.0, 0.0, 0.0, len(self.codes)) for job, one in zip(jobs, ranked, strict=True))

    def _output(self, t: int) -> StepOutput:
        if not self.graphs:
            return StepOutput(self.decode(t), None, {})
        self.graphs[t - 1].replay()
        output = self.graphs[t - 1].output
        assert output is not None
        return output

    def _rectangle(self) -> BatchState:
        """The first step: of each request's rows one is alive."""
        rows = len(self.codes)
        state = BatchState(Ancestry(self.arena, ()), rows, self.steps, self.device)
        place = torch.arange(rows, device=self.device)
        state.place(range(0, rows + 1, self.width))
        state.order = place % self.width
        state.node = torch.where(state.order == 0, 0, -1)
        state.score = torch.where(state.order == 0, 0.0, -torch.inf)
        return state

    def decode(self, t: int) -> Tensor:
        """Logits [R W, C] of step t."""
        family, rows = self.family, len(self.codes)
        x = family.bos.repeat(rows, 1) if t == 1 else family.codes[t - 2](self.codes)
        for index, block in enumerate(family.blocks):
            assert isinstance(block, Block)
            x = self._block(t, index, block, x)
        logits: Tensor = family.heads[t - 1](family.norms[t - 1](x))
        return logits

    def _block(self, t: int, index: int, block: Block, x: Tensor) -> Tensor:
        config, arena, own = self.family.config, self.arena, block.self
        group = config.kv_set(index)
        key = arena[f"cross_k.{group}"][: self.requests]
        value = arena[f"cross_v.{group}"][: self.requests] if config.kv_split == 2 else key
        asked, _, _ = block.cross.heads(normed_for(x, block.cross_norm, block.cross.qkv.weight))
        seen = self._context(asked, key, value, block.scale)
        slots = self.family.slots(arena, index)
        q, k, v = block.own(block.cross.after(x, seen, block.self_norm, own.qkv.weight), t, len(x), slots)
        if self.general:
            seen = self._prefix(t, q, (k, v), (slots.key[:, : len(x)], slots.value[:, : len(x)]), block.scale)
            x.addmm_(seen.flatten(1), own.o.weight.t())
            feed = cast(Feed, block.ffn)  # the modes are of the row without experts
            gate, up = feed.gate_up(block.ffn_norm(x)).chunk(2, 1)
            return x.add_(feed.down(silu(gate).mul_(up)))
        seen = prefix_attention(
            q, k, v, slots.key, slots.value,
            ancestry=self.ancestry, scale=block.scale, bias=self.bias[t - 1],
        )  # fmt: skip
        return block.ffn.onto(x, own.after(x, seen, block.ffn_norm, block.ffn.entry))

    def _context(self, q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Every row over its request's context, all of them full."""
        if not self.general:
            length = self.arena["cross_length"][: self.requests]
            return context_attention(q, key, value, length, self.row_start, widest=self.width, scale=scale)[0]
        rectangle = q.unflatten(0, (self.requests, self.width)).transpose(1, 2)
        grouped = q.shape[1] != key.shape[2]
        found = scaled_dot_product_attention(
            rectangle, key.transpose(1, 2), value.transpose(1, 2), scale=scale, enable_gqa=grouped
        )
        return found.transpose(1, 2).flatten(0, 1)

    def _prefix(
        self, t: int, q: Tensor, own: tuple[Tensor, Tensor], slots: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        """Every row over L positions, the later ones masked; ancestors are gathered."""
        steps = torch.arange(self.steps - 1, device=self.device)
        key, value = (
            torch.cat([slot[steps, self.ancestry.long()], mine.unsqueeze(1)], 1).transpose(1, 2)
            for slot, mine in zip(slots, own, strict=True)
        )
        mask = self.bias[t - 1][:1].to(q.dtype).view(1, 1, 1, -1)
        grouped = q.shape[1] != key.shape[1]
        found = scaled_dot_product_attention(q.unsqueeze(2), key, value, mask, scale=scale, enable_gqa=grouped)
        return found.squeeze(2)

    def _flat(self, t: int, logits: Tensor, state: BatchState) -> Survivors:
        """The best W of all rows and codes of each request, by torch."""
        trie, codes = self.snapshot.trie, self.sizes[t - 1]
        child = dense(trie.first, trie.code, state.node, trie.widest[t - 1], codes).node
        score = torch.log_softmax(logits.float(), 1) + state.score.unsqueeze(1)
        score.masked_fill_(child < 0, -torch.inf)
        best, at = score.view(self.requests, -1).topk(self.width, dim=1)
        first = torch.arange(0, len(self.codes), self.width, device=self.device).unsqueeze(1)
        parent, code = (at // codes + first).flatten(), (at % codes).flatten()
        dead = (best == -torch.inf).flatten()
        order = torch.arange(self.width, device=self.device).repeat(self.requests)
        node = child[parent, code].masked_fill(dead, -1)
        alive = self.width - dead.view(self.requests, -1).sum(1)
        return Survivors(parent.masked_fill(dead, -1), code.masked_fill(dead, -1), order, best.flatten(), node, alive)
