"""Train and evaluate the demo's model: `python -m examples.movielens.train` (see README.md beside this file).

1. train      SIDs, SASRec and `onerec` for every seed; what the candidates of `settings.py` score on validation
2. evaluate   the test item, once: baselines, and every seed's model through `widebeam recommend` at W = 10, 50, 200
3. publish    the seed that is best on validation becomes the demo: weights/v1, vocab/v1, users.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from examples.movielens import artifacts, baselines, settings
from examples.movielens.baselines import Report, SasRec
from examples.movielens.data import Split, load
from examples.movielens.evaluate import metrics, model_lists, ranks, scorer_lists
from examples.movielens.publish import publish
from examples.movielens.report import evaluate
from examples.movielens.sids import make_sids
from examples.movielens.student import Catalogue, train_student
from examples.movielens.teacher import HistorySampler, teacher

Ints = npt.NDArray[np.int64]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATA = ROOT / "data" / "ml-latest-small"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.movielens.train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".local" / "movielens", help="where trained models go")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    parser.add_argument("--steps", type=int, default=settings.STUDENT.steps, help="training steps of a model")
    parser.add_argument("--rounds", type=int, default=settings.SASREC.rounds, help="passes of SASRec")
    parser.add_argument("--jobs", type=int, default=1, help="SASRec trainings at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["train", "evaluate", "publish"], help="one of the three parts")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.mha.set_fastpath_enabled(False)  # SASRec teaches inside a CUDA graph: plain kernels only
    split = load(DATA)
    if arguments.only in {None, "train"}:
        train(split, arguments)
    if arguments.only in {None, "evaluate"}:
        evaluate(split, arguments.out, ROOT / "bench" / "results" / "movielens.json", arguments.seeds)
    if arguments.only in {None, "publish"}:
        publish(split, arguments.out, ROOT)


def train(split: Split, arguments: argparse.Namespace) -> None:
    """Part 1. Writes to --out: sids.npy, validation.json, seed-N/, and SASRec's lists for both held-out items."""
    out, device, items = arguments.out, torch.device(arguments.device), len(split.films)
    sasrec_settings = settings.SASREC._replace(rounds=arguments.rounds)
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool, shown() as progress:
        waiting = [
            pool.submit(train_sasrec, split.train, items, sasrec_settings, seed, arguments.device)
            for seed in range(arguments.seeds)
        ]
        report = progress("SIDs")
        sids = make_sids(split.train, split.films, settings.SIDS, 0)
        np.save(out / "sids.npy", sids)
        catalogue = Catalogue(sids, settings.SIDS.sizes, device)
        knn = baselines.item_knn(split.train, items, settings.KNN, device)
        report("SIDs", 1.0)
        log: dict[str, object] = {
            "item-kNN": scored(split, scorer_lists(knn, split.cases("validation")[0], 50, device))
        }
        best = settings.CANDIDATES[0]
        for seed in range(arguments.seeds):
            report = progress(f"seed {seed}")
            sasrec = restored(waiting[seed], items, sasrec_settings, device)
            scorer = baselines.sasrec_scorer(sasrec)
            log[f"SASRec, seed {seed}"] = scored(split, scorer_lists(scorer, split.cases("validation")[0], 50, device))
            np.save(out / f"sasrec-{seed}.npy", np.stack(scorer_lists(scorer, split.cases("test")[0], 50, device)))
            taught = teacher(knn, scorer, settings.TEACHER)
            sampler = HistorySampler(split.train, settings.MODEL.positions_of_items, device)
            found: dict[str, float] = {}
            for candidate in settings.CANDIDATES if seed == 0 else [best]:
                chosen = candidate.student._replace(steps=arguments.steps)
                began = time.perf_counter()
                model = train_student(candidate.model.config(), catalogue, sampler, taught, chosen, seed, report)
                trained = time.perf_counter() - began
                lists = model_lists(model, catalogue, split.cases("validation")[0], 50, settings.WIDTHS)
                score = {f"W={width}": scored(split, lists[width]) for width in settings.WIDTHS}
                log[f"{candidate.name}, seed {seed}"] = {**score, "seconds": round(trained, 1)}
                found[candidate.name] = float(
                    metrics(ranks(lists[200], split.cases("validation")[1]))["ndcg@10"].mean()
                )
                if found[candidate.name] == max(found.values()):
                    best = candidate
                    artifacts.save_model(model, out / f"seed-{seed}")
                (out / "validation.json").write_text(json.dumps({"chosen": best.name, **log}, indent=1) + "\n")


def scored(split: Split, lists: Sequence[Ints]) -> dict[str, float]:
    """Metrics of lists for the validation item."""
    places = ranks(lists, split.cases("validation")[1])
    return {name: round(float(values.mean()), 4) for name, values in metrics(places).items()}


def train_sasrec(
    train: Sequence[Ints], items: int, chosen: baselines.SasRecSettings, seed: int, device: str
) -> dict[str, npt.NDArray[np.float32]]:
    """SASRec's weights; runs in a process of its own."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    torch.set_float32_matmul_precision("high")
    model = baselines.train_sasrec(train, items, chosen, seed, torch.device(device), lambda _text, _done: None)
    return {name: tensor.cpu().numpy() for name, tensor in model.state_dict().items()}


def restored(
    future: Future[dict[str, npt.NDArray[np.float32]]],
    items: int,
    chosen: baselines.SasRecSettings,
    device: torch.device,
) -> SasRec:
    """The trained SASRec of another process."""
    model = SasRec(items, chosen)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in future.result().items()})
    return model.to(device).eval()


@contextmanager
def shown() -> Iterator[Callable[[str], Report]]:
    """Progress bars; call the value with a name for a `Report` of its own."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:

        def start(name: str) -> Report:
            task = bars.add_task(name, total=1.0)
            return lambda text, done: bars.update(task, description=f"{name}: {text}", completed=done)

        yield start


if __name__ == "__main__":
    main()
