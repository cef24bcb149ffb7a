# requires: lm-eval[api] transformers
from pathlib import Path

from feature import MODEL, QUESTION, URL, report
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

FILES = Path.home() / ".cache" / "wager" / "models" / MODEL
TOKENIZER = {"tokenizer_backend": None, "tokenized_requests": False}


def instance(kind, arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def completions():
    """Log-likelihoods of continuations."""
    model = LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions", model=MODEL, tokenizer_backend="huggingface", tokenizer=str(FILES)
    )
    pairs = [("The capital of France is", word) for word in (" Paris", " cheese")]
    found = model.loglikelihood([instance("loglikelihood", pair) for pair in pairs])
    assert found[0][0] > found[1][0]


def chat():
    model = LocalChatCompletion(base_url=f"{URL}/v1/chat/completions", model=MODEL, **TOKENIZER)
    asked = [{"role": "user", "content": QUESTION}]
    [answer] = model.generate_until(
        [instance("generate_until", (model.apply_chat_template(asked), {"max_gen_toks": 9}))]
    )
    assert answer


report(chat=chat, completions=completions)
