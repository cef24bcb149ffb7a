"""What vLLM makes of `vllm serve` commands: run by its own Python, with JSON from stdin to stdout.

A case is {"folder", "command"}; the models that the command names lie in the folder, as configurations without weights.
The answer is {"method", "depth", "by_batch"}: by_batch has the depth of every batch, where there is a table of them.
"""

import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")

from vllm.config import ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


def ask(command):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command[2:])
    args.model = args.model_tag
    engine = AsyncEngineArgs.from_cli_args(args)
    sizes = {"tensor_parallel_size": engine.tensor_parallel_size, "distributed_executor_backend": "mp"}
    config = engine.create_speculative_config(engine.create_model_config(), ParallelConfig(**sizes))
    if config is None:
        return None
    table, depth = config.num_speculative_tokens_per_batch_size, config.num_speculative_tokens
    by_batch = table and build_dynamic_sd_schedule_lookup(table, engine.max_num_seqs, depth)
    return {"method": config.method, "depth": depth, "by_batch": by_batch and by_batch[1:]}


answers = []
for case in json.load(sys.stdin):
    os.chdir(case["folder"])
    answers.append(ask(case["command"]))
sys.stdout.write("\n" + json.dumps(answers) + "\n")
