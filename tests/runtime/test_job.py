"""Planned rows: known on the host before anything runs."""

from app.runtime.job import plan_rows
from tests import support

SIZES = (4, 5, 6)


def planned(text, prefixes):
    deployment = support.deployment_of(SIZES, widths=(512, 512, 512))
    contract = support.snapshot_of(
        support.onerec_engine(SIZES, deployment.limits), support.catalogue([[0, 0, 0]], SIZES), deployment
    ).contract
    return plan_rows(support.plan_of(contract, text), contract, prefixes)


def test_a_width_is_cut_by_what_its_step_can_hold_and_widens_again_later():
    wide = "widebeam: 1\nwidths: [512, 3, 512]\n"
    assert planned(wide, (4, 20, 120)) == (1, 4, 3, 18)


def test_under_the_trie_the_catalogue_bounds_the_rows():
    assert planned("widebeam: 1\n", (2, 7, 9)) == (1, 2, 7, 9)


def test_without_the_trie_it_does_not():
    assert planned("widebeam: 1\nsteps:\n  all:\n    mask: none\n", (2, 7, 9)) == (1, 4, 20, 120)
