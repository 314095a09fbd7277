"""What commands about policies read: the deployment's contract and catalogue, folders, and policies by name, file or
id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import typer

from app.cli.deployment import read_deployment
from app.cli.output import say
from app.config import Deployment
from app.core import Contract
from app.policies.builtin import BUILT_IN
from app.policies.cache import Cache
from app.policies.diagnostics import render
from app.policies.facts import Catalogue, Facts, facts_of
from app.policies.last_good import Kept
from app.policies.load import Folder, PolicySet, compile_folder, snapshot
from app.policies.operators import Operators
from app.policies.plan import Plan
from app.policies.plugins import installed
from app.policies.resolve import Library
from app.runtime.columns import catalogue_of
from app.runtime.desired import wishes
from app.runtime.loader import load_contract
from app.runtime.state_dir import load_last_good, load_policy
from app.vocab.aggregates import side_data
from app.vocab.artifact import load_vocab

POLICY_ID = re.compile(r"[0-9a-f]{12}")


class Deployed(NamedTuple):
    """What policies are compiled for. catalogue None = the root has no vocab; operators: those that they may use."""

    root: Path
    deployment: Deployment
    contract: Contract
    catalogue: Catalogue | None
    operators: Operators = BUILT_IN

    @property
    def state(self) -> Path:
        """The server's own directory."""
        return self.root / self.deployment.server.state_dir

    @property
    def facts(self) -> Facts:
        """Everything that is declared for policies to read."""
        return facts_of(self.contract, self.catalogue)

    def cache(self) -> Cache:
        """What compiles them, empty."""
        return Cache(self.operators)

    def folder(self, directory: Path, last_good: Mapping[str, Kept] | None = None) -> PolicySet:
        """A folder of policies, compiled; `last_good` texts stand in for broken ones."""
        files = snapshot(directory, directory.as_posix())
        return compile_folder(files, self.contract, self.catalogue, last_good=last_good, cache=self.cache())

    def in_force(self) -> PolicySet:
        """What a server on this root serves: its folder, and the last good text of what is broken in it."""
        return self.folder(self.root / "policies", last_good=load_last_good(self.state))

    def policy(self, policy: str) -> Plan:
        """A policy by the name of a file of the root, by path, or by the id under which it has served; findings go to
        stderr, and errors end the command."""
        texts, name = self.texts(policy)
        loaded = compile_folder(texts, self.contract, self.catalogue, cache=self.cache()).policies[name]
        if loaded.findings:
            say(render(loaded.findings))
        if loaded.plan is None:
            if not loaded.errors:
                say(f"{policy} is abstract: nothing serves it")
            raise typer.Exit(1)
        return loaded.plan

    def texts(self, policy: str) -> tuple[Folder, str]:
        """The files that a policy, by name, path or id, is made of, and its name among them."""
        path = Path(policy) if policy.endswith(".yaml") else self.root / "policies" / f"{policy}.yaml"
        if path.is_file():
            folder = snapshot(path.parent, path.parent.as_posix())
            if path.stem in folder.sources:
                return folder, path.stem
        kept = load_policy(self.state, policy) if POLICY_ID.fullmatch(policy) else None
        if kept is None:
            raise typer.BadParameter(f"{policy} is no policy, no file, and no id that was kept under {self.state}")
        return Folder(kept.files), kept.name


def deployed(root: Path, contract: Contract | None = None) -> Deployed:
    """The contract of a root's weights and the catalogue of its vocab. Raises BadDeployment, Rejected.

    contract: in the place of the one that the root has here
    """
    deployment = read_deployment(root)
    vocabs = wishes(root, root / deployment.server.state_dir, "vocab").found
    vocab = load_vocab(vocabs[0].directory, deployment.sid.sizes) if vocabs else None
    catalogue = None if vocab is None else catalogue_of(vocab, side_data(vocab, deployment))
    return Deployed(root, deployment, contract or load_contract(root, deployment), catalogue, installed())


def write(texts: Folder, name: str, out: Path) -> None:
    """A policy's file and its ancestors' into a folder; a file that is there with another text ends the command."""
    chain = Library(texts.sources).chain(name) or (name,)
    files = {out / f"{one}.yaml": texts.sources[one].data for one in chain}
    taken = [path for path, data in files.items() if path.exists() and path.read_bytes() != data]
    if taken:
        raise typer.BadParameter(f"{taken[0]} is there already, with another text")
    out.mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        path.write_bytes(data)
        say(f"wrote {path}")
