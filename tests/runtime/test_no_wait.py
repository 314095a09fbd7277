"""Between a step's logits and its survivors nothing asks the device, whatever the policy: on one that has shapes and
kinds only, so that there is nothing to read."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

from app.core import StepOutput
from app.ops.upload import upload_into, upload_ints
from app.policies import groups, quota
from app.policies.compile import compile_policy
from app.policies.source import Source
from app.runtime.selection import Selection
from app.runtime.state import Ancestry, BatchState, Compaction
from tests import support
from tests.no_wait import NoWait
from tests.runtime.test_cookbook_search import COOKBOOK, HEADS, NARROW, root, text_of
from tests.runtime.test_policy_search import HISTORY, POLICIES, SIZES, policy

__all__ = ["root"]
DEVICE = torch.device("meta")
SHIPPED = COOKBOOK.parents[2] / "policies"
HEAD = "widebeam: 1\nwidths: [4, 8, 12]\nsteps:\n  last:\n    "
QUOTAS = {
    "code": "quota: ['cap(token[3], max=2)']",
    "codes, all of them": "mask: not seen\n    quota: ['cap(token[3], max=1)']",
    "prefix": "quota: ['cap(prefix[2], max=1)', 'cap(token[1], max=3)']",
    "category": "quota: ['cap(attr.category, max=2)']",
    "flag": "quota: ['cap(attr.cold, max=1)']",
    "label": "quota: ['cap(attr.category == \"war\", max=1)']",
    "floors": "quota: ['floor(attr.cold, min=2)', 'floor(boosted.old, min=2)', 'cap(parent, max=2)']",
    "floor of many": "quota: ['floor(attr.category, min=1)']",
}


def sources() -> dict[str, Source]:
    """Every policy that is shipped, every recipe, every operator; with numbers that fit 40 SIDs."""
    texts = {path.stem: text_of(path, NARROW) for path in sorted((*SHIPPED.glob("*.yaml"), *COOKBOOK.glob("*.yaml")))}
    texts |= {f"operator {name}": policy(text) for name, text in POLICIES.items()}
    texts |= {f"quota {name}": HEAD + text for name, text in QUOTAS.items()}
    return {name: Source(f"{name}.yaml", text.encode()) for name, text in texts.items() if name != "traffic"}


def unreadable(one: torch.Tensor) -> torch.Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device=DEVICE)


@pytest.fixture(scope="module")
def jobs(root):
    """A request under each policy, and whether that has quotas."""
    deployment, snapshot, catalogue = root
    plans, library = {}, sources()
    for name in library:
        plans[name], found = compile_policy(name, library, snapshot.contract, catalogue)
        assert plans[name] is not None, found.text()
    snapshot = snapshot.having(policies=support.Policies(plans, default="base"))
    user, without = {"age_days": 3}, HISTORY[:1]
    return [
        (
            support.job_of(snapshot, deployment, HISTORY, policy=name, k=12, user=user, exclude=without),
            b"quota:" in source.data,
        )
        for name, source in library.items()
    ]


@pytest.mark.parametrize(("kind", "line"), [(Ancestry, 0), (Compaction, 10**9)])
def test_no_policy_asks_the_device_for_anything(jobs, kind, line, monkeypatch):
    """line: of quotas; the others need not be looked at twice."""
    jobs = [job for job, quotas in jobs if quotas or not line]
    monkeypatch.setattr(quota, "LINE", line)
    monkeypatch.setattr(quota, "LOOK", 1)
    monkeypatch.setattr(groups, "MOST_PREFIXES", 1)
    snapshot = jobs[0].snapshot
    trie = snapshot.trie
    columns = {name: unreadable(one) for name, one in trie.columns.items()}
    trie = trie._replace(first=unreadable(trie.first), code=unreadable(trie.code), columns=columns)
    state = BatchState(kind({}, ()), len(jobs), len(SIZES), DEVICE)
    selection = Selection(jobs, trie, SIZES, DEVICE)
    for t, codes in enumerate(SIZES, 1):
        logits = torch.empty(state.row_start[-1], codes, device=DEVICE)
        output = StepOutput(logits, torch.empty(len(logits), device=DEVICE), dict.fromkeys(HEADS, logits))
        keep = [job.planned[t] for job in jobs]
        with NoWait():
            found = selection.select(t, output, state, keep)
            state.advance(t, found.survivors, (0, *accumulate(keep)))
        assert found.failed == {}, next(iter(found.failed.values())).__cause__
    assert state.sids.shape == (sum(keep), len(SIZES))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 1).index_put_((x > 0,), x.sum()),
        torch.nonzero,
        torch.unique,
        lambda x: torch.unique(x, dim=0),
        torch.bincount,
        torch.repeat_interleave,
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.copy_(torch.zeros(6)),
        lambda x: torch.zeros(6).to(x),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[[0, 1]],
        lambda x: x.__setitem__([0, 1], 1),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x.new_tensor([1, 2]),
        lambda x: torch.as_tensor(np.zeros(2), device=x.device),
        lambda x: x.masked_fill_(x > 0, x[0]),
        lambda x: x.index_fill(0, x, x[0]),
        lambda x: torch.linalg.inv(x.view(2, 3)[:, :2].float()),
        lambda x: torch.multinomial(x.float(), 2),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_device_that_cannot_be_read_says_so(wait, inference):
    with torch.inference_mode(inference):
        x = torch.zeros(6, dtype=torch.int64, device=DEVICE)
        with pytest.raises(AssertionError, match="waits for the device"), NoWait():
            wait(x)


@torch.inference_mode()
def test_what_asks_for_nothing_may_be_done():
    x = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    with NoWait():
        y = x[x].index_put_((x,), x).masked_fill_(x > 0, 1)[2:].clone()
        y[1:] = torch.repeat_interleave(x, x, output_size=9)[:3]
        upload_into(y, torch.zeros(4))
        upload_ints((1, 2), torch.int32, DEVICE)
        assert torch.tensor([1, 2])[[1]].tolist() == [2]
