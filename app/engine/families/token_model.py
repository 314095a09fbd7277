"""What language models whose vocabulary holds SID tokens share: prompts, token ids of codes, heads of the steps.

A prompt is tokens, or the newest items of a history as the SID tokens of each; the deployment's prefix follows. The
last prompt position predicts c1, so `encode` gives step 1's output, and step t >= 2 feeds one token a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from app.config import Limits, SidConfig
from app.core import Context, History, Inputs, InputSpec, StepOutput, TokenIds
from app.engine import layers
from app.engine.families.base import Binding, Family
from app.engine.fp8 import product
from app.engine.tokens import Ids
from app.errors import Fault, InvalidRequest, Rejected


class TokenModel(Family):
    """The vocabulary's side of a language model; a family adds its blocks between `embedded` and `output`.

    tokens[t - 1]  [C_t] int64: the token ids of step t's codes, -1 = none
    token_of       [C_1 + .. + C_L] int32: those of all steps, step t's from code_at[t - 1] on
    trunk          the name in front of the checkpoint's own tensors ("model")
    """

    contexts: ClassVar[tuple[type, ...]] = (History, TokenIds)
    log_norm = True
    first_from_encode = True

    def __init__(
        self,
        vocabulary: tuple[int, int],
        tokens: tuple[Ids, ...],
        prefix: tuple[int, ...],
        limits: Limits,
        dtype: torch.dtype,
        *,
        tied: bool,
        trunk: str = "model",
    ) -> None:
        super().__init__()
        self.tokens, self.limits, self.dtype, self.trunk = tokens, limits, dtype, trunk
        self.context, self.steps = limits.context, len(tokens)
        self.prefix = np.array(prefix, dtype=np.int32)
        self.positions = limits.context + len(prefix)
        self.unwritten = tuple(bool((ids < 0).any()) for ids in tokens)
        self.token_of = np.concatenate(tokens).astype(np.int32)
        self.code_at = np.cumsum([0, *map(len, tokens[:-1])])
        with torch.device("meta"):
            self.embed = nn.Parameter(torch.empty(vocabulary))
            self.norm = nn.Parameter(torch.empty(vocabulary[1]))
            self.head = None if tied else nn.Parameter(torch.empty(vocabulary))
            self.heads = nn.ParameterList(torch.empty(len(ids), vocabulary[1]) for ids in tokens)
        for t, ids in enumerate(tokens, 1):
            self.register_buffer(f"token_{t}", torch.from_numpy(ids.clip(0)), persistent=False)
            self.register_buffer(f"none_{t}", torch.from_numpy(np.flatnonzero(ids < 0)), persistent=False)

    @staticmethod
    def check_fit(sid: SidConfig, limits: Limits, vocabulary: int) -> None:
        """Raises Rejected where the prefix is not in the vocabulary or no item fits the context."""
        steps, prefix = len(sid.sizes), sid.prefix
        for token in prefix:
            if token >= vocabulary:
                message = f"token {token} is outside of the model's {vocabulary} tokens"
                raise Rejected("token_out_of_range", message, location="deployment.toml: sid.prefix")
        if len(prefix) + steps > limits.context:
            message = (
                f"{limits.context} positions do not hold one item of {steps} codes and {len(prefix)} prefix tokens"
            )
            raise Rejected("context_too_short", message, location="deployment.toml: limits.context")

    # ---- what the artifact holds -----------------------------------------------------------------------------------

    def token_bindings(self) -> dict[str, Binding]:
        """The bindings of everything here."""
        embed = f"{self.trunk}.embed_tokens.weight"
        head = embed if self.head is None else "lm_head.weight"
        bindings = {
            "embed": Binding((embed,)),
            "norm": Binding((f"{self.trunk}.norm.weight",)),
            **{f"heads.{t}": Binding((head,), torch.from_numpy(ids)) for t, ids in enumerate(self.tokens)},
        }
        if self.head is not None:
            bindings["head"] = Binding((head,))
        return bindings

    def token_shapes(self) -> dict[str, tuple[int, ...]]:
        """The artifact's tensors behind `token_bindings`, by name."""
        shape = tuple(self.embed.shape)
        shapes = {f"{self.trunk}.embed_tokens.weight": shape, f"{self.trunk}.norm.weight": shape[1:]}
        return shapes if self.head is None else shapes | {"lm_head.weight": shape}

    def tied(self) -> Mapping[str, str]:
        """See `Family.tied`: some exporters write a tied head twice."""
        return {"lm_head.weight": f"{self.trunk}.embed_tokens.weight"} if self.head is None else {}

    def missing_tokens(self) -> tuple[tuple[int, ...], ...]:
        """See `Family.missing_tokens`."""
        return tuple(tuple(np.flatnonzero(ids < 0).tolist()) for ids in self.tokens)

    # ---- inputs ----------------------------------------------------------------------------------------------------

    def input_specs(self) -> tuple[InputSpec, ...]:
        """`tokens`: the prompt with the prefix behind it."""
        return (InputSpec("tokens", (), torch.int32, self.positions),)

    def prepare(self, context: Context) -> Inputs:
        """A prompt as it is, or the newest items that fit as the SID tokens of each in time order; then the prefix."""
        match context:
            case TokenIds(ids):
                prompt = self._prompt(ids)
            case History(codes):
                newest = codes[max(0, len(codes) - (self.context - len(self.prefix)) // self.steps) :]
                prompt = self.token_of[newest + self.code_at].reshape(-1)
                if prompt.size and any(self.unwritten) and prompt.min() < 0:
                    raise Fault("a history holds a code without a token: the gate let its vocab through")
            case _:
                raise InvalidRequest("this model takes `history` or `tokens`", path="$.context")
        prompt = np.concatenate((prompt, self.prefix)) if len(self.prefix) else prompt
        if not prompt.size:
            raise InvalidRequest("the context is empty: there is nothing to predict from", path="$.context")
        return {"tokens": prompt}

    def _prompt(self, ids: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if len(ids) > self.context:
            message = f"{len(ids)} tokens; the model takes {self.context}"
            raise InvalidRequest(message, path="$.context.tokens")
        vocabulary = self.embed.shape[0]
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            place = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
            message = f"{ids[place]} is outside of the model's {vocabulary} tokens"
            raise InvalidRequest(message, path=f"$.context.tokens[{place}]")
        return np.array(ids, dtype=np.int32)

    # ---- computation -----------------------------------------------------------------------------------------------

    def embedded(self, t: int, codes: Tensor) -> Tensor:
        """The rows of step t >= 2 before the first block: codes [N] of step t - 1 -> [N, d]."""
        token = self.get_buffer(f"token_{t - 1}")
        return functional.embedding(token[codes.clamp(0, len(token) - 1)], self.embed)

    def output(self, t: int, hidden: Tensor, *, full: bool) -> StepOutput:
        """Step t's output of the normed last states [N, d]."""
        norm: Tensor | None = None
        if full:
            head = self.embed if self.head is None else self.head
            logits, norm = layers.pick_and_norm(hidden, head, self.get_buffer(f"token_{t}"))
        else:
            logits = product(hidden, self.heads[t - 1])
        if self.unwritten[t - 1]:
            logits = logits.index_fill_(1, self.get_buffer(f"none_{t}"), float("-inf"))
        if hidden.device.type == "cpu":
            logits = logits.float()  # 16-bit arithmetic is no gain there, and the selection computes in fp32
        return StepOutput(logits, norm, {})
