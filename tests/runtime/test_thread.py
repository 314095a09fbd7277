import threading

import torch

from app.runtime.metrics import Metrics
from app.runtime.steps import StepLoop
from app.runtime.thread import EngineThread


def test_only_the_engine_thread_computes_with_several_threads():
    before = torch.get_num_threads()
    seen: dict[str, int] = {}
    asked = threading.Event()

    class Asked(StepLoop):
        def forget(self, contract_id: str) -> None:
            seen["engine"] = torch.get_num_threads()
            asked.set()

    def look() -> None:
        seen["another"] = torch.get_num_threads()

    engine = EngineThread(Asked(lambda: 0.0, Metrics()), threads=2)
    try:
        seen["this"] = torch.get_num_threads()
        another = threading.Thread(target=look)
        another.start()
        another.join()
        engine.forget("contract")
        assert asked.wait(60)
    finally:
        engine.close()
        torch.set_num_threads(before)
    assert seen == {"engine": 2, "another": 1, "this": 1}
