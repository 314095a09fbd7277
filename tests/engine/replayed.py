"""`graphs.Recorder` without a GPU: a replay runs the step again and puts its output where it was at first."""

from __future__ import annotations

import torch

from app.core import StepOutput


class Recording:
    """fresh: it runs now, too; a capture runs nothing, whatever is in the memory then."""

    def __init__(self, run, recorder, fresh):
        self._run, self._recorder, self.output = run, recorder, None
        if fresh:
            self._place(run())

    def _place(self, output):
        self.output = None if output is None else StepOutput(*(copied(part) for part in output))

    def replay(self):
        self._recorder.replayed += 1
        with torch.inference_mode():
            new = self._run()
            if self.output is None:
                self._place(new)
            for mine, one in zip(flat(self.output), flat(new), strict=True):
                mine.copy_(one)


class Kept:
    """What a step gave once; like a graph, it holds no engine."""

    def __init__(self, run, _recorder, _fresh):
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
        return self._kind(run, self, fresh)

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
    return (
        []
        if output is None
        else [one for one in (output.logits, output.log_norm, *output.heads.values()) if one is not None]
    )
