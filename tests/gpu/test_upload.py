"""Copies beside what runs on a GPU."""

from __future__ import annotations

import torch

from app.ops.upload import upload_beside


def test_what_is_uploaded_beside_a_busy_stream_is_whole_and_spoils_nothing():
    device = torch.device("cuda", 0)
    hosts = [torch.arange(size, dtype=torch.int32) for size in (1, 5_000_000, 0, 300_000)]
    held = torch.full((5_000_000,), 7, dtype=torch.int32, device=device)
    torch.cuda._sleep(200_000_000)
    kept = held + 1  # after the sleep; the memory of `held` is free for others at once
    del held
    made = upload_beside(hosts, device)
    assert all(torch.equal(one.cpu(), host) for one, host in zip(made, hosts, strict=True))
    assert bool((kept == 8).all())
