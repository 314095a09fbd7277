"""Training of the `onerec` model: the code distributions of a teacher, and the film that really followed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from app.engine.families.onerec_config import OneRecConfig
from app.engine.families.onerec_reference import OneRecReference, PaddedContexts
from examples.movielens.baselines import Report, Scorer
from examples.movielens.teacher import Examples, HistorySampler, sample


class StudentSettings(NamedTuple):
    """steps, batch, rate, decay: AdamW over a one-cycle schedule; sids: SIDs sampled from the teacher for each history;
    truth: weight of the film that really followed; dropped, mixed: see HistorySampler.draw."""

    steps: int = 6000
    batch: int = 256
    sids: int = 16
    rate: float = 2e-3
    decay: float = 0.05
    truth: float = 0.3
    dropped: float = 0.5
    mixed: float = 0.3


class Catalogue:
    """The SIDs of the items on the device, and what follows from them. Three steps; codes [items, 3] int64."""

    def __init__(self, sids: npt.NDArray[np.int32], sizes: tuple[int, ...], device: torch.device) -> None:
        self.codes = torch.from_numpy(sids.astype(np.int64)).to(device)
        self.sizes = sizes
        self.pair = self.codes[:, 0] * sizes[1] + self.codes[:, 1]

    def contexts(self, histories: Tensor, config: OneRecConfig) -> PaddedContexts:
        """Padded item histories [B, H], newest first, as the model's contexts."""
        history = config.history
        assert history is not None
        need = history.short + history.long * history.pool
        histories = functional.pad(histories[:, :need], (0, max(0, need - histories.shape[1])), value=-1)
        codes = self.codes[histories.clamp_min(0)].masked_fill(histories[..., None] < 0, -1)
        if not history.long:
            return PaddedContexts(codes)
        older = codes[:, history.short :].unflatten(1, (history.long, history.pool))
        return PaddedContexts(codes[:, : history.short], older)


def teacher_loss(
    model: OneRecReference, catalogue: Catalogue, examples: Examples, target: Tensor, s: StudentSettings
) -> Tensor:
    """Cross-entropy against the teacher's code distributions and the following film.

    target [B, items] are the teacher's probabilities. Step 1 and 2 are compared with its exact marginals (step 2 after
    the first codes of sampled SIDs), step 3 with the sampled codes, which is the same in expectation.
    """
    first, second, _ = catalogue.sizes
    batch = len(target)
    sampled = sample(target.cumsum(1), s.sids)
    known = examples.following >= 0
    items = torch.cat([examples.following.clamp_min(0)[:, None], sampled], 1)
    sids = catalogue.codes[items]
    one, two, three = model(catalogue.contexts(examples.histories, model.config), sids[:, :, :2])
    pairs = torch.zeros(batch, first * second, device=target.device).index_add_(1, catalogue.pair, target)
    pairs = pairs.view(batch, first, second)
    log_one = torch.log_softmax(one[:, 0].float(), -1)
    log_two, log_three = torch.log_softmax(two.float(), -1), torch.log_softmax(three.float(), -1)

    after = pairs.gather(1, sids[:, 1:, 0, None].expand(-1, -1, second))
    after = after / after.sum(2, keepdim=True).clamp_min(1e-20)
    taught = -(pairs.sum(2) * log_one).sum(1).mean() - (after * log_two[:, 1:]).sum(2).mean()
    taught = taught - log_three[:, 1:].gather(2, sids[:, 1:, 2, None]).mean()

    true = sids[:, 0]
    chosen = log_one.gather(1, true[:, 0, None]) + log_two[:, 0].gather(1, true[:, 1, None])
    chosen = (chosen + log_three[:, 0].gather(1, true[:, 2, None])).squeeze(1)
    real = -(chosen * known).sum() / known.sum().clamp_min(1)
    return (1 - s.truth) * taught + s.truth * real


def train_student(
    config: OneRecConfig,
    catalogue: Catalogue,
    sampler: HistorySampler,
    teacher: Scorer,
    settings: StudentSettings,
    seed: int,
    report: Report,
) -> OneRecReference:
    """A trained model in eval mode."""
    device = catalogue.codes.device
    torch.manual_seed(seed)
    model = OneRecReference(config)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    model = model.to(device).train()
    optimizer = _optimizer(model, settings)

    def advance() -> Tensor:
        examples = sampler.draw(settings.batch, settings.dropped, settings.mixed)
        loss = teacher_loss(model, catalogue, examples, teacher(examples.histories), settings)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    step = advance if device.type == "cpu" else _captured(advance, optimizer)
    for number in range(settings.steps):
        _set_rate(optimizer, settings.rate * _schedule(number / settings.steps))
        loss = step()
        if number % 50 == 49:
            report(f"onerec, loss {loss.item():.3f}", (number + 1) / settings.steps)
    return model.eval()


def _optimizer(model: OneRecReference, settings: StudentSettings) -> torch.optim.AdamW:
    """AdamW without weight decay on norms and age embeddings. Its rate is a tensor, which a CUDA graph reads anew."""
    decayed = [p for name, p in model.named_parameters() if p.dim() == 2 and "age" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "age" in name]
    groups = [{"params": decayed, "weight_decay": settings.decay}, {"params": others, "weight_decay": 0.0}]
    cuda = decayed[0].device.type == "cuda"
    rate = torch.tensor(0.0, device=decayed[0].device)
    return torch.optim.AdamW(groups, rate, betas=(0.9, 0.98), fused=cuda, capturable=cuda)


def _set_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def _schedule(done: float) -> float:
    """Share of the peak rate: up in the first twentieth, then down a cosine."""
    if done < 0.05:
        return done / 0.05
    return 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))


def _captured(advance: Callable[[], Tensor], optimizer: torch.optim.AdamW) -> Callable[[], Tensor]:
    """One training step as a CUDA graph: the model is small, and launching its kernels one by one takes longer than
    running them. Three steps at rate 0 come before, so that everything is allocated."""
    _set_rate(optimizer, 0.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            advance()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = advance()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay
