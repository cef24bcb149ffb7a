"""Run by vLLM's Python: answers the requests that the standard input has as JSON, and prints what came of them.

In: `model`; `engine`: arguments of LLM; `requests`: ids, params, salt, of which `streams` run at a time, and whether it
is to `abort` after so many steps; `fault`: a name of FAULTS; `ray`: whether Ray starts the worker. Out: `texts` by
request and choice, `steps`, `counters` of speculation and of preemptions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _drafter_raises() -> None:
    from wager.draft.lookup import LookupDrafter

    LookupDrafter.propose = lambda *_: [][1]  # type: ignore[method-assign,assignment,return-value]


def _drafter_is_slow() -> None:
    from wager.draft.lookup import LookupDrafter

    quick = LookupDrafter.propose

    def slow(drafter: Any, requests: Any) -> Any:
        time.sleep(0.3)
        return quick(drafter, requests)

    LookupDrafter.propose = slow  # type: ignore[method-assign]


def _proposer_raises() -> None:
    from wager_vllm.decisions import Decisions

    Decisions.plan = lambda *_: [][1]  # type: ignore[method-assign,assignment,return-value]


def _version_unknown() -> None:
    from wager_vllm import compat

    compat.VERSIONS = {}


FAULTS = {
    "drafter": _drafter_raises,
    "slow": _drafter_is_slow,
    "proposer": _proposer_raises,
    "version": _version_unknown,
    "": lambda: None,
}


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    asked: dict[str, Any] = json.load(sys.stdin)
    FAULTS[asked.get("fault", "")]()
    if asked.get("ray"):
        import ray

        ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=True)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    llm = LLM(asked["model"], enforce_eager=True, disable_log_stats=False, **asked["engine"])
    engine, texts, steps = llm.llm_engine, {}, 0
    waiting = list(enumerate(asked["requests"]))
    running: set[str] = set()
    left: dict[str, int] = {}  # steps until a request is aborted
    while waiting or running:
        while waiting and len(running) < asked.get("streams", 8):
            number, request = waiting.pop(0)
            params = dict(request["params"])
            if "json" in params:
                params["structured_outputs"] = StructuredOutputsParams(json=params.pop("json"))
            prompt = {"prompt_token_ids": request["ids"]}
            if request.get("salt"):
                prompt["cache_salt"] = request["salt"]
            engine.add_request(
                f"{number}",
                prompt,
                SamplingParams(**{"temperature": 0.0, "output_kind": RequestOutputKind.FINAL_ONLY, **params}),
            )
            running.add(f"{number}")
            if "abort" in request:
                left[f"{number}"] = request["abort"]
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = [list(choice.token_ids) for choice in output.outputs]
                running.discard(output.request_id)
        steps += 1
        for name in [name for name, count in left.items() if count == 0]:
            engine.abort_request([name], internal=False)
            running.discard(name)
        left = {name: count - 1 for name, count in left.items() if count}
    counters = {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(("vllm:spec_decode_num_", "vllm:num_preemptions")) and "per_pos" not in metric.name
    }
    print(json.dumps({"texts": texts, "steps": steps, "counters": counters}), file=out, flush=True)
    os._exit(0)  # workers are ended with the process group


if __name__ == "__main__":
    main()
