"""Scripts as vLLM's examples are, but for the import and the path of the model: batches, chats, prefixes, streams."""

import asyncio
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from enginewright import LLM, AsyncEngineArgs, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, TokensPrompt

PROMPTS = ["The lazy dog", "The capital of France is", "user: Hello", "An engine"]


@pytest.fixture
def model(path: Path) -> str:
    return str(path)


def test_a_batch(model: str) -> None:
    """The script basic.py."""
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=model, tensor_parallel_size=1, seed=0)
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert isinstance(output, RequestOutput) and output.finished
        assert len(output.outputs[0].token_ids) == 16 or output.outputs[0].finish_reason == "stop"


def test_chats(model: str) -> None:
    """The script chat.py: options of the engine from the command line, one conversation, then many."""
    parser = ArgumentParser()
    parser.add_argument("--model", default=model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=7)
    args = vars(parser.parse_args([]))
    chosen = SamplingParams(max_tokens=args.pop("max_tokens"), temperature=0.0, ignore_eos=True)
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens, sampling_params.temperature, sampling_params.ignore_eos = 7, 0.0, True
    conversation = [
        {"role": "system", "content": "You answer."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! What is it?"},
        {"role": "user", "content": "The capital of France."},
    ]
    (one,) = llm.chat(conversation, sampling_params, use_tqdm=False)
    many = llm.chat([conversation for _ in range(10)], chosen, use_tqdm=True)
    assert [output.outputs for output in many] == [one.outputs] * 10 and len(one.outputs[0].token_ids) == 7


def test_prompts_rendered_by_the_script(model: str) -> None:
    """Scripts that render a conversation with the tokenizer, and pass the text or its tokens to generate."""
    llm = LLM(model, max_model_len=300)
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Who are you?"}]
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[tokenizer.eos_token_id])
    expected = llm.chat(messages, params)[0].outputs
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert llm.generate(TokensPrompt(prompt_token_ids=ids), params)[0].outputs == expected
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert llm.generate({"prompt_token_ids": ids}, params.clone())[0].outputs == expected


def test_a_shared_prefix(model: str) -> None:
    """The script prefix_caching_offline.py: the same completions of two engines, with and without the cache."""
    prompts = ["The quick brown fox jumps over the lazy dog. " * 5 + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular_llm = LLM(model=model, enable_prefix_caching=False, gpu_memory_utilization=0.4)
    thread = regular_llm._thread._thread
    plain = [output.outputs[0].text for output in regular_llm.generate(prompts, sampling_params)]
    del regular_llm
    assert not thread.is_alive(), "its memory is given back"
    prefix_cached_llm = LLM(model=model, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(prompts, sampling_params)
    assert [output.outputs[0].text for output in outputs] == plain
    assert all(output.num_cached_tokens > 0 for output in outputs)


def test_streams(model: str) -> None:
    """The script async_llm_streaming.py: pieces of text, until the output says that it is finished."""

    async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
        sampling_params = SamplingParams(
            max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
        )
        pieces = []
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
            assert output.request_id == request_id
            for completion in output.outputs:
                pieces.append(completion.text)
            if output.finished:
                break
        return "".join(pieces)

    async def main() -> list[str]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True))
        try:
            return [await stream_response(engine, prompt, f"stream-{n}") for n, prompt in enumerate(PROMPTS)]
        finally:
            engine.shutdown()

    with LLM(model) as llm:
        expected = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=42))
    assert asyncio.run(main()) == [output.outputs[0].text for output in expected]


def test_notes_are_on_stderr(model: str, tmp_path: Path) -> None:
    """A script that sets up no logging gets a line on stderr for each option without effect."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from enginewright import LLM, SamplingParams\n"
        "llm = LLM(model=sys.argv[1], data_parallel_size=1, swap_space=4, max_model_len=64)\n"
        "print(len(llm.generate('Hello', SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    done = subprocess.run([sys.executable, str(script), model], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "data_parallel_size=1 has no effect",
        "swap_space=4 has no effect",
    ]
