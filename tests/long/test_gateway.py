"""A picker before two processes of a real model: conversations go to the server that has them."""

from contextlib import ExitStack
from pathlib import Path

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.passes.quant import quant_config
from tests.helpers.picker import Endpoint, Picker, Subscriber
from tests.long.test_prefill_decode import Process
from tests.server.test_gateway import LABELS

CONVERSATIONS, TURNS, FIRST_TOKENS, TURN_TOKENS = 7, 4, 150, 70


def turns(conversation: int) -> list[list[int]]:
    """The prompts of a conversation, each of which begins with the one before."""
    tokens = [1000 + conversation * 400 + place * 7 % 397 for place in range(FIRST_TOKENS + TURNS * TURN_TOKENS)]
    return [tokens[: FIRST_TOKENS + turn * TURN_TOKENS] for turn in range(TURNS)]


def computed(servers: list[Process], picker: Picker, subscribers: list[Subscriber], salt: str) -> list[int]:
    """Prompt tokens that were computed under the picker, and if the servers take turns."""
    found = []
    for way in ("picked", "turns"):
        tokens, number = 0, 0
        for turn in range(TURNS):
            for conversation in range(CONVERSATIONS):
                body = {"prompt": turns(conversation)[turn], "cache_salt": f"{salt} {way}"}
                choice = number % 2
                if way == "picked":
                    choice = picker.endpoints.index(picker.pick(body)[0])
                options = {"max_tokens": 1, "logprobs": None, "cache_salt": body["cache_salt"]}
                usage = servers[choice].complete(turns(conversation)[turn], **options)["usage"]
                tokens += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                number += 1
                blocks = usage["prompt_tokens"] // picker.endpoints[choice].load().block_size
                keys = picker.keys(body, picker.endpoints[choice].load().block_size)
                assert blocks - len(keys) in (0, 1)
                subscribers[choice].follow(lambda endpoint, keys=keys: endpoint.matched(keys) == len(keys))  # type: ignore[misc]
        found.append(tokens)
    return found


def compare(engine: Path, folder: Path) -> tuple[list[int], list[int]]:
    """Computed tokens of both ways, and requests of each server."""
    with ExitStack() as stack:
        servers, endpoints, subscribers = [], [], []
        for place in range(2):
            events, replay = f"ipc://{folder}/{place}", f"ipc://{folder}/{place}.replay"
            options = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-topic", f"kv@10.0.0.{place}@m")
            server = Process(engine, folder / f"{place}.log", "--metrics-compat", "vllm", *options)
            stack.callback(server.end)
            endpoint = Endpoint(f"127.0.0.1:{server.port}", LABELS)
            subscriber = Subscriber(endpoint, events, replay)
            stack.callback(subscriber.close)
            subscriber.catch_up()
            servers.append(server)
            endpoints.append(endpoint)
            subscribers.append(subscriber)
        found = computed(servers, Picker(endpoints), subscribers, "salt")
        return found, [int(server.metric("request_prompt_tokens_count")) for server in servers]


def test_a_picker_computes_less_than_turns(smollm2_gguf: Path, tmp_path: Path) -> None:
    """An odd number of conversations, so that servers that take turns see each conversation alternately."""
    engine = tmp_path / "smollm2.engine"
    config = BuildConfig(quant=quant_config("int8-wo"), gate=None)
    build_engine(open_checkpoint(str(smollm2_gguf)), config, engine)
    (picked, in_turns), requests = compare(engine, tmp_path)
    least = CONVERSATIONS * (FIRST_TOKENS + (TURNS - 1) * TURN_TOKENS)
    assert least <= picked <= 1.3 * least and picked <= 0.75 * in_turns
    assert sum(requests) == 2 * TURNS * CONVERSATIONS
