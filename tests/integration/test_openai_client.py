"""The OpenAI Python client, unmodified, against a 1P:1D cluster of a tiny model."""

import os

import openai
import pytest

from cluster import Cluster, tiny

EOS = 2
IDS = [1, *range(40, 75)]


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0, timeout=60) as c:
        yield c


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def complete(client, prompt="The relay begins", model="", extra=None, **params):
    params.setdefault("max_tokens", 8)
    params.setdefault("temperature", 0)
    return client.completions.create(model=model, prompt=prompt, extra_body=extra or {}, **params)


def test_models(client, cluster):
    models = client.models.list().data
    assert [m.id for m in models] == [os.path.basename(cluster.model)]
    assert models[0].object == "model"


def test_completion(client, model):
    r = complete(client, model=model, extra={"ignore_eos": True})
    assert r.object == "text_completion" and r.model == model
    assert len(r.choices) == 1 and r.choices[0].finish_reason == "length"
    assert r.usage.completion_tokens == 8
    assert r.usage.total_tokens == r.usage.prompt_tokens + 8
    assert r.usage.prompt_tokens_details.cached_tokens == 0
    assert r.usage.transferred_tokens == r.usage.prompt_tokens


def test_completion_stream_has_the_same_text(client, model):
    whole = complete(client, model=model, max_tokens=24, logprobs=3, extra={"ignore_eos": True})
    text, values, finish = "", [], None
    for chunk in complete(client, model=model, max_tokens=24, logprobs=3, stream=True, extra={"ignore_eos": True}):
        assert chunk.object == "text_completion" and chunk.usage is None
        choice = chunk.choices[0]
        text += choice.text
        values += choice.logprobs.token_logprobs
        finish = choice.finish_reason or finish
    assert text == whole.choices[0].text
    assert values == whole.choices[0].logprobs.token_logprobs
    assert finish == "length" and len(values) == 24


def test_chat(client, model):
    messages = [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "Who runs first?"}]
    r = client.chat.completions.create(model=model, messages=messages, max_tokens=9, temperature=0,
                                       extra_body={"ignore_eos": True})
    assert r.object == "chat.completion"
    assert r.choices[0].message.role == "assistant" and r.choices[0].finish_reason == "length"
    assert r.usage.completion_tokens == 9
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
             {"role": "user", "content": [{"type": "text", "text": "Who runs first?"}]}]
    text, role, finish = "", None, None
    with client.chat.completions.create(model=model, messages=parts, max_completion_tokens=9, temperature=0, stream=True,
                                        extra_body={"ignore_eos": True}) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            delta = chunk.choices[0].delta
            role = delta.role or role
            text += delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
    assert (role, finish) == ("assistant", "length")
    assert text == r.choices[0].message.content


def test_chat_logprobs(client, model):
    r = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Go"}], max_tokens=5,
                                       temperature=0, logprobs=True, top_logprobs=4, extra_body={"ignore_eos": True})
    content = r.choices[0].logprobs.content
    assert len(content) == 5
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)


def test_chat_max_tokens_defaults_to_the_context(client, model, cluster):
    r = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Go"}], temperature=0,
                                       extra_body={"ignore_eos": True})
    context = cluster.cluster()["context"]
    assert r.usage.prompt_tokens + r.usage.completion_tokens == context
    assert r.choices[0].finish_reason == "length"


def test_completion_max_tokens_defaults_to_16(client, model):
    r = client.completions.create(model=model, prompt=IDS, temperature=0, extra_body={"ignore_eos": True})
    assert r.usage.completion_tokens == 16


def test_n(client, model):
    r = complete(client, model=model, n=3, temperature=1, seed=11, max_tokens=12, extra={"ignore_eos": True})
    assert [c.index for c in r.choices] == [0, 1, 2]
    assert len({c.text for c in r.choices}) == 3, "choices with one seed must differ"
    assert r.usage.completion_tokens == 36
    alone = complete(client, model=model, temperature=1, seed=11, max_tokens=12, extra={"ignore_eos": True})
    assert alone.choices[0].text == r.choices[0].text
    text = ["", "", ""]
    finish = [None] * 3
    for chunk in complete(client, model=model, n=3, temperature=1, seed=11, max_tokens=12, stream=True,
                          extra={"ignore_eos": True}):
        for c in chunk.choices:
            assert finish[c.index] is None, "a chunk after the choice's finish"
            text[c.index] += c.text
            finish[c.index] = c.finish_reason
    assert text == [c.text for c in r.choices]
    assert finish == ["length"] * 3


def test_stop_string(client, model):
    whole = complete(client, model=model, max_tokens=40, extra={"ignore_eos": True})
    text = whole.choices[0].text
    stop = text[11:14]
    r = complete(client, model=model, max_tokens=40, stop=["never \x01 there", stop], extra={"ignore_eos": True})
    assert r.choices[0].finish_reason == "stop"
    assert r.choices[0].text == text[:text.index(stop)]
    assert r.usage.completion_tokens < 40
    streamed = "".join(c.choices[0].text for c in complete(client, model=model, max_tokens=40, stop=stop, stream=True,
                                                           extra={"ignore_eos": True}))
    assert streamed == r.choices[0].text


def test_stop_token_ids(client, model, cluster):
    r = complete(client, model=model, max_tokens=12, logprobs=0, extra={"ignore_eos": True})
    fourth = r.choices[0].logprobs.tokens[3]
    everything = cluster.json("/tokenize", {"prompt": fourth, "add_special_tokens": False})["tokens"]
    if len(everything) != 1 or fourth in r.choices[0].logprobs.tokens[:3]:
        pytest.skip("the fourth token is not recognisable by its text")
    s = complete(client, model=model, max_tokens=12, extra={"ignore_eos": True, "stop_token_ids": everything})
    assert s.choices[0].finish_reason == "stop" and s.usage.completion_tokens == 4


def test_logprobs(client, model):
    r = complete(client, model=model, logprobs=5, extra={"ignore_eos": True})
    lp = r.choices[0].logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == 8
    for token, value, top in zip(lp.tokens, lp.token_logprobs, lp.top_logprobs):
        assert top[token] == value == max(top.values())
        assert 4 <= len(top) <= 5  # two tokens may have one spelling


def test_echo(client, model):
    prompt = "The relay begins"
    plain = complete(client, model=model, prompt=prompt, extra={"ignore_eos": True})
    r = complete(client, model=model, prompt=prompt, echo=True, logprobs=1, extra={"ignore_eos": True})
    assert r.choices[0].text == prompt + plain.choices[0].text
    lp = r.choices[0].logprobs
    assert len(lp.tokens) == r.usage.prompt_tokens + 8
    assert lp.token_logprobs[0] is None and all(v <= 0 for v in lp.token_logprobs[1:])
    only = complete(client, model=model, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == prompt and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs == lp.token_logprobs[:r.usage.prompt_tokens]


def test_include_usage(client, model):
    chunks = list(complete(client, model=model, stream=True, stream_options={"include_usage": True},
                           extra={"ignore_eos": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert all(c.usage is None and c.choices for c in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "length"
    each = list(complete(client, model=model, stream=True,
                         stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [c.usage.completion_tokens for c in each]
    assert counts == sorted(counts) and counts[0] >= 1


def test_max_tokens_1_needs_no_decode_node(client, model, cluster):
    cluster.wait_idle()
    before = cluster.metric_sum("baton_kv_transferred_tokens_total")
    r = complete(client, model=model, prompt=IDS, max_tokens=1, logprobs=2, extra={"ignore_eos": True})
    assert r.usage.completion_tokens == 1 and r.choices[0].finish_reason == "length"
    assert len(r.choices[0].logprobs.tokens) == 1
    assert r.usage.transferred_tokens == 0
    whole = complete(client, model=model, prompt=IDS, max_tokens=2, logprobs=2, extra={"ignore_eos": True})
    assert whole.choices[0].logprobs.token_logprobs[0] == r.choices[0].logprobs.token_logprobs[0]
    cluster.wait_idle()
    assert cluster.metric_sum("baton_kv_transferred_tokens_total") == before + len(IDS), "only the second one moved"


def test_first_token_is_eos(client, model):
    r = complete(client, model=model, prompt=IDS, logit_bias={str(EOS): 100})
    assert r.choices[0].text == "" and r.choices[0].finish_reason == "stop"
    assert r.usage.completion_tokens == 1 and r.usage.transferred_tokens == 0


def test_min_tokens_and_ignore_eos(client, model):
    bias = {str(EOS): 100}
    r = complete(client, model=model, prompt=IDS, max_tokens=9, logit_bias=bias, extra={"min_tokens": 4})
    assert r.choices[0].finish_reason == "stop" and r.usage.completion_tokens == 5
    r = complete(client, model=model, prompt=IDS, max_tokens=9, logit_bias=bias, extra={"ignore_eos": True})
    assert r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 9


def test_logit_bias_forces_and_bans(client, model):
    r = complete(client, model=model, prompt=IDS, logprobs=0, logit_bias={"50": 100}, extra={"ignore_eos": True})
    tokens = set(r.choices[0].logprobs.tokens)
    assert len(tokens) == 1
    free = complete(client, model=model, prompt=IDS, logprobs=1, extra={"ignore_eos": True})
    banned = complete(client, model=model, prompt=IDS, logprobs=1, logit_bias={"50": -100}, extra={"ignore_eos": True})
    assert tokens.isdisjoint(banned.choices[0].logprobs.tokens)
    assert len(free.choices[0].logprobs.tokens) == 8


def test_list_prompts(client, model):
    texts = ["The relay begins", "Nobody waits for the baton", "12, 345"]
    r = complete(client, model=model, prompt=texts, extra={"ignore_eos": True})
    assert [c.index for c in r.choices] == [0, 1, 2]
    for prompt, choice in zip(texts, r.choices):
        assert complete(client, model=model, prompt=prompt, extra={"ignore_eos": True}).choices[0].text == choice.text
    lists = [[1, 40, 41], [1, *range(60, 90)]]
    r = complete(client, model=model, prompt=lists, n=2, temperature=1, seed=3, extra={"ignore_eos": True})
    assert [c.index for c in r.choices] == [0, 1, 2, 3]
    assert r.usage.prompt_tokens == 2 * sum(map(len, lists)), "each choice is counted as it ran"
    assert r.usage.completion_tokens == 4 * 8


def test_ids_are_taken_verbatim(client, model, cluster):
    ids = cluster.json("/tokenize", {"prompt": "The relay begins"})["tokens"]
    assert ids[0] == 1, "text gets the tokenizer's special tokens"
    by_text = complete(client, model=model, prompt="The relay begins", logprobs=0)
    by_ids = complete(client, model=model, prompt=ids, logprobs=0)
    assert by_text.usage.prompt_tokens == by_ids.usage.prompt_tokens == len(ids)
    assert by_text.choices[0].logprobs == by_ids.choices[0].logprobs


def test_seed(client, model):
    def draw(**kw):
        return complete(client, model=model, prompt=IDS, temperature=1.0, max_tokens=20, extra={"ignore_eos": True},
                        **kw).choices[0].text

    assert draw(seed=5) == draw(seed=5)
    assert draw(seed=5) != draw(seed=6)
    assert len({draw() for _ in range(4)}) > 1, "without a seed one is drawn"


def test_sampling_parameters_have_an_effect(client, model):
    greedy = complete(client, model=model, prompt=IDS, max_tokens=20, extra={"ignore_eos": True}).choices[0].text
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        r = complete(client, model=model, prompt=IDS, max_tokens=20, temperature=1, extra={"ignore_eos": True, **extra})
        assert r.choices[0].text == greedy, extra
    r = complete(client, model=model, prompt=IDS, max_tokens=20, temperature=1, top_p=1e-6, extra={"ignore_eos": True})
    assert r.choices[0].text == greedy
    r = complete(client, model=model, prompt=IDS, max_tokens=60, logprobs=0, presence_penalty=2, frequency_penalty=2,
                 extra={"ignore_eos": True, "repetition_penalty": 5.0})
    seen = r.choices[0].logprobs.tokens
    assert max(map(seen.count, seen)) < 10


def test_timings(client, model):
    r = complete(client, model=model, prompt=IDS, extra={"timings": True, "ignore_eos": True})
    t = r.timings
    for name in ("tokenize_ms", "queue_ms", "prefill_ms", "first_token_ms", "transfer_ms", "transfer_tail_ms",
                 "decode_ms", "detokenize_ms"):
        assert t[name] >= 0, name
    assert t["first_token_ms"] >= t["prefill_ms"] > 0
    assert t["prefill_tokens"] == t["transferred_tokens"] == len(IDS)
    assert t["transferred_bytes"] > 0 and t["decode_tokens"] in (7, 8)


def test_headers(client, model):
    raw = client.completions.with_raw_response.create(
        model=model, prompt=IDS, max_tokens=3, extra_headers={"x-request-id": "abc-1", "traceparent": "00-" + "1" * 32 +
                                                              "-" + "2" * 16 + "-01"}, extra_body={"ignore_eos": True})
    assert raw.headers["x-request-id"] == "abc-1"
    assert raw.headers["x-baton-prefill"] == "prefill-0" and raw.headers["x-baton-decode"] == "decode-0"


def test_neutral_and_unknown_fields(client, model):
    r = complete(client, model=model, max_tokens=2, extra={
        "ignore_eos": True, "best_of": 1, "repetition_penalty": 1, "suffix": None, "user": "me", "no_such_field": {"a": 1},
        "response_format": {"type": "text"}})
    assert r.usage.completion_tokens == 2


@pytest.mark.parametrize("params,name", [
    ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -3}, "max_tokens"), ({"logprobs": 21}, "logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"stop": [1]}, "stop"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"),
    ({"prompt": [1, 99999]}, "prompt"), ({"seed": "a"}, "seed"), ({"extra": {"min_tokens": 99}}, "min_tokens"),
    ({"extra": {"top_k": -5}}, "top_k"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"extra": {"best_of": 4}}, "best_of"), ({"extra": {"suffix": "end"}}, "suffix"),
    ({"extra": {"response_format": {"type": "json_object"}}}, "response_format"),
])
def test_bad_parameters_are_named(client, model, params, name):
    with pytest.raises(openai.BadRequestError) as e:
        complete(client, model=model, **params)
    assert e.value.param is not None and e.value.param.split(".")[0].split("[")[0] == name
    assert name in e.value.body["message"]
    assert e.value.type == "invalid_request_error"


@pytest.mark.parametrize("params,name", [
    ({"messages": []}, "messages"), ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}, "top_logprobs"),
])
def test_bad_chats_are_named(client, model, params, name):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=model, **params)
    assert e.value.param.split(".")[0].split("[")[0] == name


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as e:
        complete(client, model="no-such-model")
    assert "no-such-model" in e.value.body["message"]


def test_context_overflow_names_both_numbers(client, model, cluster):
    context = cluster.cluster()["context"]
    with pytest.raises(openai.BadRequestError) as e:
        complete(client, model=model, prompt=[5] * 100, max_tokens=context)
    assert str(context) in e.value.body["message"] and "100" in e.value.body["message"]
    with pytest.raises(openai.BadRequestError):
        complete(client, model=model, prompt=[5] * (context + 1), max_tokens=1)
    r = complete(client, model=model, prompt=[5] * (context - 2), max_tokens=2, extra={"ignore_eos": True})
    assert r.usage.total_tokens == context


def test_api_keys(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# who may\nsecret-1 alice\nsecret-2\n", encoding="utf-8")
    with Cluster(tiny("llama"), router_opts=["--api-key-file", str(keys)], wait=False) as c:
        def with_key(key):
            return openai.OpenAI(base_url=f"{c.url}/v1", api_key=key, max_retries=0, timeout=60)

        for key in ("secret-1", "secret-2"):
            with with_key(key) as good:
                assert good.models.list().data
        for key in ("secret-3", "secret-1x", "secret"):
            with with_key(key) as bad, pytest.raises(openai.AuthenticationError):
                bad.completions.create(model="", prompt="a")
        status, _, body = c.http("/v1/models")
        assert status == 401 and b"error" in body
        assert c.http("/live")[0] == 200, "probes carry no key"
