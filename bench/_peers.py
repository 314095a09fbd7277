"""The other ways to run the same search: transformers' `generate`, and own loops over transformers' model that run the
prompt once. The own loops are written as well as their author could; the best of them counts as the fair peer.

All of them search the same catalogue through the same CSR arrays, normalise over the whole vocabulary, and return
`[B][(SID, score), ...]`, best first. They run in a process of their own (`peers`), so that their OpenMP threads and
Widebeam's are never in one process: libgomp's threads sleep where they would spin once there are more than cores.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench._setting import Setting, make_catalogue, make_histories, make_model, make_prompts

Found = list[list[tuple[tuple[int, ...], float]]]


class Catalogue:
    """The catalogue as CSR arrays over trie nodes, made once.

    first [nodes + 1], code [edges]: children of node v are the edges first[v]:first[v + 1], edge e leads to node e + 1
    node_of[t]: trie node of a prefix of t codes by its number in mixed radix; -1 = no prefix (dense: small here)
    """

    def __init__(self, sids: npt.NDArray[np.int32], sizes: tuple[int, ...], base: tuple[int, ...]) -> None:
        self.sizes, self.base = sizes, base
        first, codes, edges = [], [], 0
        self.node_of, self.widest = [torch.zeros(1, dtype=torch.long)], []
        number = np.zeros(len(sids), np.int64)
        nodes, start = np.zeros(1, np.int64), 0
        for t, size in enumerate(sizes):
            number = number * size + sids[:, t]
            below = np.unique(number)
            begins = np.searchsorted(below // size, nodes)
            self.widest.append(int(np.diff(np.append(begins, len(below))).max()))
            first.append(begins + edges)
            codes.append(below % size)
            edges += len(below)
            start += len(nodes)
            if t + 1 < len(sizes):
                dense = torch.full((int(np.prod(sizes[: t + 1])),), -1, dtype=torch.long)
                dense[torch.from_numpy(below)] = torch.arange(start, start + len(below))
                self.node_of.append(dense)
            nodes = below
        first.append(np.full(2, edges))
        self.first, self.code = torch.from_numpy(np.concatenate(first)), torch.from_numpy(np.concatenate(codes))

    def children(self, node: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates of step t (0..L-1): edges, codes, legal, each [N, F]."""
        low, high = self.first[node], self.first[node + 1]
        widest = int((high - low).max()) if t else self.widest[0]
        edge = low.unsqueeze(1) + torch.arange(widest)
        legal = edge < high.unsqueeze(1)
        edge = edge.clamp(max=len(self.code) - 1)
        return edge, self.code[edge], legal


class CsrMask:
    """A logits processor that leaves the legal children of each beam's prefix."""

    def __init__(self, catalogue: Catalogue, prompt: int) -> None:
        self._catalogue, self._prompt = catalogue, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [B * W, prompt + t], scores [B * W, V]: log-probabilities over the vocabulary."""
        c, t = self._catalogue, input_ids.shape[1] - self._prompt
        number = torch.zeros(len(input_ids), dtype=torch.long)
        for step in range(t):
            number = number * c.sizes[step] + (input_ids[:, self._prompt + step] - c.base[step])
        node = c.node_of[t][number.clamp(0, len(c.node_of[t]) - 1)]
        _, code, legal = c.children(node.clamp(min=0), t)
        legal &= (node >= 0).unsqueeze(1)
        token = (code + c.base[t]).masked_fill(~legal, 0)  # token 0 stands for nothing
        kept = torch.full_like(scores, -torch.inf).scatter_(1, token, scores.gather(1, token))
        kept[:, 0] = -torch.inf
        return kept


class Generate:
    """transformers' own beam search: `generate(num_beams=W)` with the CSR mask."""

    name = "generate"

    def __init__(self, model: Any, catalogue: Catalogue) -> None:
        self._model, self._catalogue = model, catalogue
        model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def search(self, prompts: Tensor, width: int) -> Found:
        """prompts [B, P] token ids."""
        from transformers import LogitsProcessorList  # noqa: PLC0415

        steps, (batch, prompt) = len(self._catalogue.sizes), prompts.shape
        out = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=steps,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            logits_processor=LogitsProcessorList([CsrMask(self._catalogue, prompt)]),
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        codes = out.sequences[:, prompt:].view(batch, width, steps) - torch.tensor(self._catalogue.base)
        return _found(codes, out.sequences_scores.view(batch, width))


class OwnLoop:
    """Prompt once per request, then an own loop. What they share: the last position's logits only, one log-sum-exp
    instead of a log-softmax copy, candidates gathered through the CSR arrays, one top-k a request."""

    name = "own loop"

    def __init__(self, model: Any, catalogue: Catalogue) -> None:
        self._model, self._catalogue = model, catalogue
        self._head = model.lm_head.weight

    @torch.inference_mode()
    def search(self, prompts: Tensor, width: int) -> Found:
        """prompts [B, P] token ids."""
        from transformers import DynamicCache  # noqa: PLC0415

        c, (batch, prompt) = self._catalogue, prompts.shape
        cache = DynamicCache(config=self._model.config)
        hidden = self._model.model(prompts, cache=cache, use_cache=True).last_hidden_state[:, -1]
        score = torch.zeros(batch, 1)
        node = torch.zeros(batch, 1, dtype=torch.long)
        codes, parent = torch.zeros(batch, 1, 0, dtype=torch.long), node
        carried: Any = None
        for t in range(len(c.sizes)):
            if t:
                tokens = codes[:, :, -1] + c.base[t - 1]
                hidden, carried = self._decode(cache, tokens, prompt, t, parent, carried)
            logits = hidden @ self._head.T
            edge, code, legal = c.children(node.reshape(-1), t)
            logp = logits.gather(1, code + c.base[t]) - logits.logsumexp(1, keepdim=True)
            total = (logp + score.reshape(-1, 1)).masked_fill_(~legal, -torch.inf).view(batch, -1)
            score, best = total.topk(min(width, total.shape[1]), dim=1)
            parent = best // code.shape[1]
            node = edge.view(batch, -1).gather(1, best) + 1
            written = code.view(batch, -1).gather(1, best).unsqueeze(2)
            codes = torch.cat([codes.gather(1, parent.unsqueeze(2).expand(-1, -1, t)), written], 2)
            if not bool((score > -torch.inf).all()):  # fewer candidates than beams: the shortest row decides
                keep = int((score > -torch.inf).sum(1).min())
                score, node, codes, parent = score[:, :keep], node[:, :keep], codes[:, :keep], parent[:, :keep]
        return _found(codes, score)

    def _decode(
        self, cache: Any, tokens: Tensor, prompt: int, t: int, parent: Tensor, carried: Any
    ) -> tuple[Tensor, Any]:
        """tokens [B, W] of step t - 1, each beam's parent among the beams of the step before [B, W].

        Returns the last hidden states [B * W, d], and what the next call wants to know.
        """
        raise NotImplementedError


class Repeated(OwnLoop):
    """`cache.batch_repeat_interleave(W)` after the prompt, `cache.reorder_cache` after every step."""

    name = "own loop, repeated cache"

    def _decode(
        self, cache: Any, tokens: Tensor, prompt: int, t: int, parent: Tensor, carried: Any
    ) -> tuple[Tensor, Any]:
        batch, width = tokens.shape
        if t == 1:
            cache.batch_repeat_interleave(width)
        else:
            self._reorder(cache, (parent + carried * torch.arange(batch).unsqueeze(1)).reshape(-1), prompt)
        position = torch.full((1, 1), prompt + t - 1)
        out = self._model.model(tokens.reshape(-1, 1), position_ids=position, cache=cache, use_cache=True)
        return out.last_hidden_state[:, -1], width

    def _reorder(self, cache: Any, rows: Tensor, prompt: int) -> None:
        del prompt
        cache.reorder_cache(rows)


class Tail(Repeated):
    """As `Repeated`, but all beams of a request have one prompt: only what they wrote themselves is reordered."""

    name = "own loop, tail reordered"

    def _reorder(self, cache: Any, rows: Tensor, prompt: int) -> None:
        for layer in cache.layers:
            if len(rows) != len(layer.keys):
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
                continue
            layer.keys[:, :, prompt:] = layer.keys[rows, :, prompt:]
            layer.values[:, :, prompt:] = layer.values[rows, :, prompt:]


class Tree(OwnLoop):
    """Nothing is repeated: the beams of a request are query positions of one sequence, and a mask says which of the
    earlier positions belong to each (tree attention). The prompt's keys are held once a request."""

    name = "own loop, tree mask"

    def _decode(
        self, cache: Any, tokens: Tensor, prompt: int, t: int, parent: Tensor, carried: Any
    ) -> tuple[Tensor, Any]:
        batch, width = tokens.shape
        own = torch.eye(width).bool().expand(batch, width, width)
        if t == 1:
            seen = torch.cat([torch.ones(batch, width, prompt, dtype=torch.bool), own], 2)
        else:
            inherited = carried.gather(1, parent.unsqueeze(2).expand(-1, -1, carried.shape[2]))
            seen = torch.cat([inherited, own], 2)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).unsqueeze(1)
        out = self._model.model(
            tokens,
            attention_mask=mask,
            position_ids=torch.full((1, width), prompt + t - 1),
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state.flatten(0, 1), seen


def _found(codes: Tensor, scores: Tensor) -> Found:
    """codes [B, W, L], scores [B, W], best first; what `generate` fills up with is dropped."""
    return [
        [(tuple(sid), value) for sid, value in zip(sids, row, strict=True) if value > -1e8]
        for sids, row in zip(codes.tolist(), scores.tolist(), strict=True)
    ]


KINDS = (Generate, Repeated, Tail, Tree)
NAMES = tuple(kind.name for kind in KINDS)
Kind = Callable[[Any, Catalogue], Any]
"""Of a contestant: makes one of a model, which has a `name` and a `search`."""


class Peers:
    """The process of the peers, asked by name."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def search(self, name: str, batch: int, width: int) -> Found:
        """What a peer finds for the first `batch` prompts."""
        self._pipe.send((name, batch, width, True))
        found: Found = self._pipe.recv()
        return found

    def milliseconds(self, name: str, batch: int, width: int) -> float:
        """How long the same search takes there."""
        self._pipe.send((name, batch, width, False))
        return float(self._pipe.recv())


@contextmanager
def peers(
    setting: Setting,
    batch: int,
    threads: int,
    exported: Path,
    *,
    make: Callable[[Setting], Any] = make_model,
    kinds: Sequence[Kind] = KINDS,
) -> Iterator[Peers]:
    """Start the process; it makes the model of the contestants and writes it to `exported` as transformers does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, setting, batch, threads, exported, make, kinds), daemon=True)
    process.start()
    try:
        theirs.close()
        ours.recv()  # the model is there
        yield Peers(ours)
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def _work(
    pipe: Connection,
    setting: Setting,
    batch: int,
    threads: int,
    exported: Path,
    make: Callable[[Setting], Any],
    kinds: Sequence[Kind],
) -> None:
    torch.set_num_threads(threads)
    model, sids = make(setting), make_catalogue(setting)
    model.save_pretrained(exported)
    catalogue = Catalogue(sids, setting.sizes, setting.token_base)
    prompts = make_prompts(setting, sids, make_histories(setting, batch))
    all_of_them = {one.name: one for one in (kind(model, catalogue) for kind in kinds)}
    pipe.send("ready")
    while True:
        try:
            name, count, width, whole = pipe.recv()
        except EOFError:
            return
        start = time.perf_counter()
        found = all_of_them[name].search(prompts[:count], width)
        taken = 1e3 * (time.perf_counter() - start)
        pipe.send(found if whole else taken)
