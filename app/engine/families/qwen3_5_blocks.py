"""The two kinds of block of a Gated DeltaNet hybrid, over prompts and over the rows of a decode step.

Norms are zero-centred: they multiply by 1 + weight. A block names the state that it carries; the family allocates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.core import Rows, StateSpec
from app.engine import layers
from app.engine.families.qwen3_5_config import HybridConfig
from app.engine.fp8 import product
from app.engine.moe import Mixture, Routing
from app.ops import gdn
from app.ops.attention import causal_attention, context_attention, extend_attention

State = Mapping[str, Tensor]
"""The state of one block by the names of its specs."""
RECORD = ("alpha", "delta", "delta_k", "delta_norm")
"""The states that are a row's transition record, in the order of `gdn.Records`."""


class Prompts(NamedTuple):
    """The prompts of a batch end to end, as every block needs them. T tokens, R requests.

    start     [R + 1] int32, position [T] int64 of each token in its prompt, place [T] int64 in [R * positions]
    angles    [T, 2, rotary]
    chunks    how the gated delta rule cuts them
    """

    start: Tensor
    position: Tensor
    place: Tensor
    angles: Tensor
    chunks: gdn.Chunks

    @property
    def requests(self) -> int:
        """R."""
        return self.start.shape[0] - 1

    @property
    def last(self) -> Tensor:
        """[R] the last token of each prompt."""
        return self.start[1:] - 1


class Step(NamedTuple):
    """The rows of step t as every block needs them: slots (t, n) are written unless `final`.

    length  [R] of the prompts; angles [N, 2, rotary]; widest: rows of a request, at most
    """

    t: int
    final: bool
    rows: Rows
    length: Tensor
    angles: Tensor
    widest: int


def centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dim; the mean is in float32."""
    normed = functional.rms_norm(x, x.shape[-1:], eps=eps)
    return torch.addcmul(normed, normed, weight)


class Block(nn.Module):
    """What both kinds share: the norms around the mixer, and the SwiGLU or the experts behind it."""

    def __init__(self, c: HybridConfig, routing: Routing | None) -> None:
        super().__init__()
        self.config = c
        self.input_norm = nn.Parameter(torch.empty(c.hidden_size))
        self.post_norm = nn.Parameter(torch.empty(c.hidden_size))
        self.experts = Mixture(routing, c.hidden_size) if routing is not None else None
        if routing is None:
            self.gate_up = nn.Parameter(torch.empty(2 * c.intermediate_size, c.hidden_size))
            self.down = nn.Parameter(torch.empty(c.hidden_size, c.intermediate_size))

    def states(self, positions: int, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """What the block carries; prompts have at most `positions` tokens."""
        raise NotImplementedError

    def encode(self, x: Tensor, prompts: Prompts, state: State, *, last: bool) -> Tensor:
        """x [T, d] -> [T, d], or [R, d] of the last positions only; fills the request-scoped state."""
        raise NotImplementedError

    def step(self, x: Tensor, step: Step, state: State) -> Tensor:
        """x [N, d] -> [N, d]; writes the rows' slots."""
        raise NotImplementedError

    def _after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + mixed
        normed = centred_norm(x, self.post_norm, self.config.eps)
        if self.experts is not None:
            return self.experts(normed, x)  # type: ignore[no-any-return]
        return x + layers.swiglu(normed, self.gate_up, self.down)


class LinearBlock(Block):
    """A Gated DeltaNet layer. qkvz: q, k, v, z and ba: b, a are one product each; kernel is the convolution's."""

    def __init__(self, c: HybridConfig, routing: Routing | None) -> None:
        super().__init__(c, routing)
        self.qkvz = nn.Parameter(torch.empty(c.channels + c.values, c.hidden_size))
        self.ba = nn.Parameter(torch.empty(2 * c.value_heads, c.hidden_size))
        self.kernel = nn.Parameter(torch.empty(c.channels, 1, c.kernel))
        self.a_log = nn.Parameter(torch.empty(c.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(c.value_heads))
        self.o_norm = nn.Parameter(torch.empty(c.value_dim))
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.values))

    def states(self, positions: int, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """S_ctx and the convolution's tail per request; the transition record and the convolution's input per row slot.

        Deltas are float32 beside float32 weights, else float16: they are small, and float16 rounds eight times finer
        than bfloat16. Keys are kept as the convolution gives them, beside the inverse of their length.
        """
        del positions
        c, record = self.config, torch.float32 if dtype == torch.float32 else torch.float16
        return (
            StateSpec("s_ctx", (c.value_heads, c.key_dim, c.value_dim), torch.float32, "request"),
            StateSpec("conv_tail", (c.kernel - 1, c.channels), dtype, "request"),
            StateSpec("conv_input", (c.channels,), dtype, "row"),
            StateSpec("alpha", (c.value_heads,), torch.float32, "row"),
            StateSpec("delta", (c.value_heads, c.value_dim), record, "row"),
            StateSpec("delta_k", (c.key_heads, c.key_dim), dtype, "row"),
            StateSpec("delta_norm", (c.key_heads,), torch.float32, "row"),
        )

    def encode(self, x: Tensor, prompts: Prompts, state: State, *, last: bool) -> Tensor:
        """See `Block.encode`."""
        mixed, z, log_alpha, beta = self._projected(x)
        window, tail = gdn.causal_convolution(mixed, self.kernel.squeeze(1), prompts.start, prompts.position)
        q, k, v = self._heads(window)
        rule = (gdn.unit_queries(q), gdn.unit_keys(k), v, log_alpha, beta)
        o, s_ctx = gdn.chunked_delta_rule(*rule, prompts.chunks)
        state["s_ctx"][: prompts.requests] = gdn.pack(s_ctx, x.dtype) if self.packs(x) else s_ctx
        state["conv_tail"][: prompts.requests] = tail
        if last:
            x, z, o = (part[prompts.last] for part in (x, z, o))
        return self._after(x, self._mixed(o, z))

    def step(self, x: Tensor, step: Step, state: State) -> Tensor:
        """See `Block.step`: projection replay over the records of the rows' ancestors (OneLA 3.2)."""
        rows, n, count = step.rows, x.shape[0], step.length.shape[0]
        into = None if step.final else step.t - 1
        key = None if into is None else state["delta_k"][into, :n].flatten(1)  # the record's place
        mixed, z, log_alpha, beta = self._projected(x)
        window = gdn.window_convolution(
            mixed, self.kernel.squeeze(1), state["conv_tail"][:count], state["conv_input"],
            request=rows.request, ancestry=rows.ancestry, first=1, compact=rows.compact, key=key,
        )  # fmt: skip
        o = self._replayed(window, key, log_alpha, beta, rows, state, into)
        if into is not None:
            state["conv_input"][into, :n] = mixed
        return self._after(x, self._mixed(o, z))

    def _replayed(
        self,
        window: Tensor,
        key: Tensor | None,
        log_alpha: Tensor,
        beta: Tensor,
        rows: Rows,
        state: State,
        into: int | None,
    ) -> Tensor:
        """o [N, HV, V] float32, with the records written: one kernel where it fits, else torch's operators.

        key  [N, HK K] in its record already; None: it is in the window, and no record is written
        """
        s_ctx, c = state["s_ctx"][: rows.row_start.numel() - 1], self.config
        records = gdn.Records(*(state[name] for name in RECORD))
        how: dict[str, Any] = {"row_start": rows.row_start, "ancestry": rows.ancestry, "compact": rows.compact}
        if gdn.unfit(window, s_ctx, records, key_heads=c.key_heads, ancestors=rows.ancestry.shape[1] - 1) is None:
            return gdn.fused_replay(
                window,
                log_alpha,
                beta,
                s_ctx,
                records,
                key_heads=c.key_heads,
                key=key,
                first=1,
                into=into,
                early=True,
                **how,
            )
        if self.packs(window):
            s_ctx = gdn.unpack(s_ctx, window.dtype)
        q, k, v = self._heads(window, key)
        alpha, norm = log_alpha.exp_(), gdn.inverse_length(k)
        unit = k.float() * norm.unsqueeze(2)
        o, delta = gdn.replay(gdn.unit_queries(q), unit, v, alpha, beta, s_ctx, records, first=1, **how)
        if into is not None:
            records.put(into, gdn.Record(alpha, delta, k, norm))
        return o

    def packs(self, x: Tensor) -> bool:
        """Whether S_ctx lies as the kernel reads it: on this device, for this dtype, in all steps or none."""
        c = self.config
        return gdn.unfit_state(x.device, x.dtype, c.key_heads, c.value_heads, c.key_dim, c.value_dim) is None

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, d] -> q, k, v before the convolution [N, channels], z [N, HV, V], log alpha and beta [N, HV]."""
        c = self.config
        normed = centred_norm(x, self.input_norm, c.eps)
        mixed, z = torch.split(product(normed, self.qkvz), [c.channels, c.values], 1)
        gates = gdn.decay_and_beta(functional.linear(normed, self.ba), self.a_log, self.dt_bias)
        return mixed, z.view(x.shape[0], c.value_heads, c.value_dim), *gates

    def _heads(self, window: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The convolved channels [N, channels] as q, k [N, HK, K], v [N, HV, V]; k is `key` where it lies apart."""
        c = self.config
        q, k, v = torch.split(window, [c.keys, c.keys, c.values], 1)
        q, k = (part.view(window.shape[0], c.key_heads, c.key_dim) for part in (q, k if key is None else key))
        return q, k, v.view(window.shape[0], c.value_heads, c.value_dim)

    def _mixed(self, o: Tensor, z: Tensor) -> Tensor:
        return product(gdn.gated_norm(o, z, self.o_norm, self.config.eps).flatten(1), self.out)


class FullBlock(Block):
    """A full attention layer with an output gate. qkv: head by head the query and its gate, then k and v; the norms of
    q and k lie head by head."""

    def __init__(self, c: HybridConfig, routing: Routing | None) -> None:
        super().__init__(c, routing)
        heads = 2 * (c.heads + c.kv_heads)
        self.qkv = nn.Parameter(torch.empty(heads * c.dim, c.hidden_size))
        self.qkv_bias = nn.Parameter(torch.empty(heads * c.dim)) if c.bias else None
        self.qk_norm = nn.Parameter(torch.empty((c.heads + c.kv_heads) * c.dim))
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.heads * c.dim))
        self.out_bias = nn.Parameter(torch.empty(c.hidden_size)) if c.bias else None

    def states(self, positions: int, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Keys and values: of the prompt per request, of one position per row slot."""
        heads = (self.config.kv_heads, self.config.dim)
        return (
            *(StateSpec(f"prompt_{x}", (positions, *heads), dtype, "request") for x in "kv"),
            *(StateSpec(x, heads, dtype, "row") for x in "kv"),
        )

    def encode(self, x: Tensor, prompts: Prompts, state: State, *, last: bool) -> Tensor:
        """See `Block.encode`."""
        q, k, v, gate = self._projected(x, prompts.angles)
        count, scale = prompts.requests, self._scale
        state["prompt_k"].flatten(0, 1).index_copy_(0, prompts.place, k)
        state["prompt_v"].flatten(0, 1).index_copy_(0, prompts.place, v)
        if not last:
            longest = state["prompt_k"].shape[1]
            attended = causal_attention(q, k, v, prompts.start, longest=longest, scale=scale)
            return self._after(x, self._mixed(attended, gate))
        x, q, gate = (part[prompts.last] for part in (x, q, gate))
        keys, values = state["prompt_k"][:count], state["prompt_v"][:count]
        each = torch.arange(count + 1, device=x.device)
        attended, _ = context_attention(q, keys, values, prompts.start.diff(), each, widest=1, scale=scale)
        return self._after(x, self._mixed(attended, gate))

    def step(self, x: Tensor, step: Step, state: State) -> Tensor:
        """See `Block.step`: each row over its request's prompt, and over its ancestors' slots."""
        rows, n, count, scale = step.rows, x.shape[0], step.length.shape[0], self._scale
        q, k, v, gate = self._projected(x, step.angles)
        keys, values = state["prompt_k"][:count], state["prompt_v"][:count]
        shared = context_attention(q, keys, values, step.length, rows.row_start, widest=step.widest, scale=scale)
        attended = extend_attention(
            shared, q, k, v, state["k"], state["v"],
            ancestry=rows.ancestry, scale=scale, first=1, compact=rows.compact,
        )  # fmt: skip
        if not step.final:
            state["k"][step.t - 1, :n] = k
            state["v"][step.t - 1, :n] = v
        return self._after(x, self._mixed(attended, gate))

    @property
    def _scale(self) -> float:
        return float(self.config.dim**-0.5)

    def _projected(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, d] -> q [N, H, D], k, v [N, Hkv, D], q and k at their positions, and the gate [N, H, D]."""
        c = self.config
        qkv = product(centred_norm(x, self.input_norm, c.eps), self.qkv, self.qkv_bias)
        asked, key, v = torch.split(qkv.view(x.shape[0], -1, c.dim), [2 * c.heads, c.kv_heads, c.kv_heads], 1)
        q, gate = asked.view(x.shape[0], c.heads, 2, c.dim).unbind(2)
        qk = centred_norm(torch.cat([q, key], 1), self.qk_norm.view(-1, c.dim), c.eps)
        qk = torch.cat([layers.rotate(qk[:, :, : c.rotary], angles), qk[:, :, c.rotary :]], 2)
        return qk[:, : c.heads], qk[:, c.heads :], v, gate

    def _mixed(self, attended: Tensor, gate: Tensor) -> Tensor:
        return product((attended * torch.sigmoid(gate)).flatten(1), self.out, self.out_bias)
