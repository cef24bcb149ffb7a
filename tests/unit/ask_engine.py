"""Guesses of another engine, asked in its own Python, where wager is not installed: JSON from stdin, an answer as the
last line of stdout. test_export_command.py compares them with wager's.

A question is {"engine", "target", "drafter", "method", "guesses", "contexts"}: folders of models, a method of the
engine, how many tokens are guessed, and texts as lists of token ids. The answer is {"version", "guesses"}: what the
engine guesses after each text, null where it would not have written the text's last token itself; or {"version",
"refused"}: why it cannot be asked.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

Question = dict[str, Any]


def ask_vllm(question: Question) -> dict[str, Any]:
    """The first draft behind each text: without its last token it is a prompt, which that token should follow. Drafts
    pass through Scheduler.update_draft_token_ids, if scheduling is not asynchronous."""
    import transformers
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.scheduler import Scheduler

    answer: dict[str, Any] = {"version": vllm.__version__}
    # MiMo's own configuration is code in its folder, which is not run: it is Qwen2's with a number of modules
    mimo: Any = type("MiMoConfig", (transformers.Qwen2Config,), {"model_type": "mimo"})
    transformers.AutoConfig.register("mimo", mimo, exist_ok=True)
    if question["method"] == "dspark" and current_platform.is_cpu():
        why = "on a CPU vLLM has no DSpark: its model runner V1 refuses it, and V2 needs Triton"
        return {**answer, "refused": why}
    drafts: dict[str, list[int]] = {}
    update = Scheduler.update_draft_token_ids

    def kept(self: Any, drafted: Any) -> None:
        for request, tokens in zip(drafted.req_ids, drafted.draft_token_ids, strict=True):
            if request in self.requests and not self.requests[request].is_prefill_chunk:
                drafts.setdefault(request.partition("-")[0], list(tokens))  # behind - is what vLLM adds to an id
        update(self, drafted)

    Scheduler.update_draft_token_ids = kept
    contexts = question["contexts"]
    speculative = {"method": question["method"], "num_speculative_tokens": question["guesses"]}
    llm = vllm.LLM(
        question["target"],
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        max_num_seqs=8,
        max_model_len=max(map(len, contexts)) + question["guesses"] + 16,
        speculative_config={**speculative, "model": question["drafter"]},
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": text[:-1]} for text in contexts], params, use_tqdm=False)
    answer["guesses"] = [
        drafts.get(output.request_id) if output.outputs[0].token_ids[0] == text[-1] else None
        for text, output in zip(contexts, outputs, strict=True)
    ]
    return answer


def ask_transformers(question: Question) -> dict[str, Any]:
    """A draft model's own continuations of the texts: what `generate(assistant_model=...)` would propose."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(question["drafter"], dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    guesses = []
    for text in question["contexts"]:
        ids = torch.tensor([text])
        found = model.generate(ids, attention_mask=ids >= 0, max_new_tokens=question["guesses"], do_sample=False)
        guesses.append(found[0, len(text) :].tolist())
    return {"version": transformers.__version__, "guesses": guesses}


if __name__ == "__main__":
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.update(quiet | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})  # the scheduler runs here: its drafts are read
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    asked = json.load(sys.stdin)
    found = {"vllm": ask_vllm, "transformers": ask_transformers}[asked["engine"]](asked)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # engines leave threads and processes that would be waited for
