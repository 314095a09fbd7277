"""`graphs.Recorder` without a GPU: a replay runs the step again and puts its output where it was at first."""

from __future__ import annotations

import torch

from app.core import StepOutput


class Recording:
    def __init__(self, run, recorder):
        self._run, self._recorder = run, recorder
        self.output = StepOutput(*(copied(part) for part in run()))

    def replay(self):
        self._recorder.replayed += 1
        with torch.inference_mode():
            for mine, new in zip(flat(self.output), flat(self._run()), strict=True):
                mine.copy_(new)


class Kept:
    """What a step gave once; like a graph, it holds no engine."""

    def __init__(self, run, _recorder):
        self.output = run()

    def replay(self):
        pass


class Replays:
    """Counts what is recorded. `alone`: how many recordings ran once before."""

    def __init__(self, kind=Recording):
        self.recorded, self.alone, self.ended, self.replayed, self._kind = 0, 0, 0, 0, kind
        self.left = 1 << 40

    def record(self, run, *, fresh):
        self.recorded += 1
        self.alone += fresh
        return self._kind(run, self)

    def used(self):
        return 7 * self.recorded

    def free(self):
        return self.left

    def end(self, *, fresh):
        self.ended += 1


def copied(part):
    if isinstance(part, torch.Tensor):
        return torch.full_like(part, torch.nan)
    return part if part is None else {name: copied(one) for name, one in part.items()}


def flat(output):
    return [one for one in (output.logits, output.log_norm, *output.heads.values()) if one is not None]
