# requires: lm-eval[api]
from feature import MODEL, QUESTION, URL, report
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


def instance(kind, arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def completions():
    """Log-likelihoods of continuations; the server has the tokenizer."""
    model = LocalCompletionsAPI(base_url=f"{URL}/v1/completions", model=MODEL)
    assert model.tokenizer_backend == "remote" and model.prefix_token_id > 0
    pairs = [("The capital of France is", word) for word in (" Paris", " cheese")]
    found = model.loglikelihood([instance("loglikelihood", pair) for pair in pairs])
    assert found[0][0] > found[1][0]


def chat():
    model = LocalChatCompletion(base_url=f"{URL}/v1/chat/completions", model=MODEL)
    asked = [{"role": "user", "content": QUESTION}]
    [answer] = model.generate_until(
        [instance("generate_until", (model.apply_chat_template(asked), {"max_gen_toks": 9}))]
    )
    assert answer


report(chat=chat, completions=completions)
