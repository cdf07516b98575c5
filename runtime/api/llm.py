"""`LLM`: an engine as a library, under vLLM's names, so that a script ports by changing an import.

from enginewright import LLM, SamplingParams

llm = LLM("model.engine")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(output.outputs[0].text)
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any
from weakref import finalize

from enginewright.adapter_file import AdapterFile
from enginewright.errors import EngineError, UsageError, shorten
from enginewright.runtime.api.beam_outputs import BeamSearchOutput, BeamSearchParams, beam_output
from enginewright.runtime.api.collector import Collector
from enginewright.runtime.api.embeddings import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    TextReader,
    Vector,
    check_dimensions,
    not_finite,
    pairs_of,
    scores_of,
    tokens_to_score,
    vector_of,
)
from enginewright.runtime.api.engine_thread import AnyRequest, EngineThread, close_all
from enginewright.runtime.api.progress_bar import ProgressBar
from enginewright.runtime.api.vllm_options import check_call_options, runtime_config
from enginewright.runtime.core.embedding_core import EmbeddingCore, TextTokens, open_core
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.engine_kind import refuse_answers, refuse_scores, refuse_vectors
from enginewright.runtime.core.outputs import Delta, RequestOutput
from enginewright.runtime.core.params import default_params, params_of
from enginewright.runtime.core.prompts import (
    Conversation,
    Prompt,
    conversations_of,
    encode_prompt,
    is_list,
    salt_of,
    text_of,
)
from enginewright.runtime.core.request import OutputSink
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.step.work_class import WorkClass
from enginewright.runtime.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
OnProgress = Callable[[int, int], None]
OnOutput = Callable[[int, RequestOutput], None]
Priority = int | Sequence[int] | None


@dataclass(frozen=True)
class LoRARequest:
    """Names the adapter that an answer is computed with."""

    lora_name: str  # name of the adapter
    lora_int_id: int = 0  # number of the adapter in vLLM, of no use here
    lora_path: str = ""  # adapter file, as `engine adapter` makes it


Adapter = LoRARequest | Sequence[LoRARequest | None] | None  # of all prompts, or one for each


class LLM:
    """An open engine, and a thread that runs it.

    Requests from any thread are computed together in one continuous batch. Close it, or use it in `with`, to free its
    memory.

    Args:
        model: an engine file, or an open engine (which stays open).
        limits: fields of RuntimeConfig: max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory,
            enable_prefix_caching, threads, …; options of vLLM that have no effect here are noted in the log.

    Raises:
        UsageError: a limit is unknown, or its value is not valid.
        EngineError: the engine cannot be opened or does not fit (errors.py).
    """

    def __init__(self, model: str | Path | Engine, **limits: Any) -> None:
        config = runtime_config(**limits)
        owned: Engine | None = None
        if not isinstance(model, Engine):
            model = owned = open_engine(model, config.device)
        self.engine = model
        try:
            core = open_core(self.engine, config)
            self._thread = EngineThread(core)
        except BaseException:
            close_all(None, owned)
            raise
        self.max_model_len, executor = core.max_model_len, core.executor
        self.memory_plan, self.isa, self.threads = executor.memory_plan, executor.isa, executor.threads
        self._close = finalize(self, close_all, self._thread, owned)  # also when it is garbage-collected, and at exit
        self._request_ids = count()

    @property
    def _core(self) -> EngineCore | EmbeddingCore:
        return self._thread.core

    def get_tokenizer(self) -> Tokenizer:
        """Tokenizer of the engine."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Default sampling parameters of the model (generation_config.json)."""
        return default_params(self.engine)

    def encode(self, prompt: Prompt) -> list[int]:
        """Converts a prompt in any form to token ids."""
        return encode_prompt(prompt, self.engine.tokenizer, self.max_model_len)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raises UsageError for a request that `generate` would refuse."""
        self._core.request(prompt, params_of(params, self.engine), _Inbox().sink(0))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        on_progress: OnProgress | None = None,
        on_output: OnOutput | None = None,
        cache_salt: str = "",
        priority: Priority = None,
        lora_request: Adapter = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Generates completions of all prompts, computed together.

        Args:
            prompts: one or several: a text, token ids, a TextPrompt or a TokensPrompt.
            sampling_params: one for all prompts, or one for each; None means the model's defaults.
            use_tqdm: whether to show a progress bar on a terminal.
            on_progress: called with (number of completed requests, number of generated tokens) as tokens arrive.
            on_output: called with (index of the prompt, its output) as requests end.
            cache_salt: prompts with different salts share no cache blocks; a prompt may have a salt of its own.
            priority: one for all prompts, or one for each (WorkClass); lower values are more urgent, and None is 0.
            lora_request: adapter of all prompts, or one for each; None is the engine's own weights.
            vllm_options: arguments of vLLM's, such as trace_headers, at values that change nothing.

        Returns:
            One output per prompt, in the prompts' order.

        Raises:
            UsageError: a prompt or its parameters are not valid; nothing has been computed then.
        """
        check_call_options(vllm_options)
        return self._complete(
            _each(prompts), sampling_params, use_tqdm, on_progress, cache_salt, priority, on_output, lora_request
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        use_tqdm: bool = False,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_progress: OnProgress | None = None,
        cache_salt: str = "",
        priority: Priority = None,
        lora_request: Adapter = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Generates the next message of conversations through the model's chat template; otherwise like `generate`.

        Args:
            messages: one conversation, a list of messages with role and content; or several. A content is a text, or
                a list of {"type": "text", "text": …}. A role is system, developer (the same), user, assistant or tool.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            add_generation_prompt: True lets the model start a message; False ends the prompt with the last message.
            chat_template_kwargs: further variables of the template, such as enable_thinking.
            tools: tools that the template shows to the model, in OpenAI's format. Calls are in the output's text.
            on_progress: as in `generate`.
            cache_salt: as in `generate`.
            priority: as in `generate`.
            lora_request: as in `generate`.
            vllm_options: as in `generate`.
        """
        check_call_options(vllm_options)
        names = {} if chat_template_kwargs is None else chat_template_kwargs
        conversations = [
            Conversation(one, add_generation_prompt, names, tools or ()) for one in conversations_of(messages)
        ]
        return self._complete(
            conversations, sampling_params, use_tqdm, on_progress, cache_salt, priority, lora_request=lora_request
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        cache_salt: str = "",
        **vllm_options: Any,
    ) -> list[BeamSearchOutput]:
        """Finds the likeliest answers to prompts, like transformers' `generate(num_beams=…)` (beam_search.py).

        Args:
            prompts: as in `generate`.
            params: the parameters of the search.
            use_tqdm: as in `generate`.
            cache_salt: as in `generate`.
            vllm_options: as in `generate`.

        Returns:
            The answers to each prompt, in the prompts' order.

        Raises:
            UsageError: a prompt or a parameter is not valid; nothing has been computed then.
        """
        check_call_options(vllm_options)
        if not isinstance(params, BeamSearchParams):
            raise UsageError(f"params is {shorten(params)}", "it must be a BeamSearchParams")
        tokenizer = self.get_tokenizer()
        return [
            beam_output(
                output, [tokenizer.decode([*output.prompt_token_ids, *one.token_ids]) for one in output.outputs]
            )
            for output in self._complete(_each(prompts), params.sampling(), use_tqdm, None, cache_salt, None)
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> "DeltaStream":
        """Generates one completion (or n of them) as a stream of deltas. A request that is not valid raises at once.

        A stream that nobody reads goes on; one that is garbage-collected ends.

        Args:
            prompt: as in `generate`.
            sampling_params: as in `generate`, but only one.
            cache_salt: as in `generate`.
            lora_request: the adapter of the answer; None: the engine's own weights.
        """
        refuse_answers(self.engine)
        params = params_of(sampling_params, self.engine)
        (adapter,) = _adapters_of(lora_request, 1, self._core)
        inbox, salt = _Inbox(), salt_of(prompt, cache_salt)
        request = self._core.request(self.encode(prompt), params, inbox.sink(0), salt, adapter=adapter)
        self._thread.submit(request)
        return DeltaStream(inbox, params.n, lambda: self._thread.abort(request))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **vllm_options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Computes the vectors of texts with an embedding model.

        Args:
            prompts: one or several: a text, token ids, a TextPrompt or a TokensPrompt.
            use_tqdm: whether to show a progress bar on a terminal.
            dimensions: the number of elements of a vector, if the model supports fewer.
            prompt_name: the name of the model's prompt before the texts; None is its default, if it has one.
            truncate_prompt_tokens: the number of tokens that are kept of a longer text; -1 is as many as fit.
            vllm_options: arguments of vLLM's at values that change nothing.

        Returns:
            One output per text, in their order.

        Raises:
            UsageError: the engine gives no vectors, or an argument is not valid; nothing has been computed then.
            EngineError: the model's numbers are not finite.
        """
        check_call_options(vllm_options)
        refuse_vectors(self.engine)
        check_dimensions(self.engine, dimensions)
        reader = TextReader(self.engine, self.max_model_len, truncate_prompt_tokens)
        texts = [reader.text(prompt, prompt_name) for prompt in _each(prompts)]
        rows = self._rows(texts, use_tqdm)
        vectors = [vector_of(self.engine.embedding, row, dimensions) for row in rows]
        return [
            EmbeddingRequestOutput(str(next(self._request_ids)), EmbeddingOutput(vector.tolist()), text.ids)
            for text, vector in zip(texts, vectors, strict=True)
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_tqdm: bool = False,
        truncate_prompt_tokens: int | None = None,
        **vllm_options: Any,
    ) -> list[ScoringRequestOutput]:
        """Computes the similarity of texts: the score of a cross-encoder, or the cosine of their vectors.

        Args:
            text_1: one text, which is compared with each of text_2, or as many texts as these.
            text_2: one text, or several.
            use_tqdm: as in `embed`.
            truncate_prompt_tokens: as in `embed`.
            vllm_options: as in `embed`.

        Returns:
            One output per pair, in their order.

        Raises:
            UsageError, EngineError: as `embed`.
        """
        check_call_options(vllm_options)
        refuse_scores(self.engine)
        pairs = pairs_of(text_1, text_2)
        texts = tokens_to_score(self.engine, TextReader(self.engine, self.max_model_len, truncate_prompt_tokens), pairs)
        return [
            ScoringRequestOutput(str(next(self._request_ids)), ScoringOutput(found.score), found.ids)
            for found in scores_of(self.engine, pairs, texts, self._rows(texts, use_tqdm))
        ]

    def _rows(self, texts: Sequence[TextTokens], use_tqdm: bool) -> list[Vector]:
        """Rows that the engine computes for texts, in their order."""
        inbox = _Inbox()
        assert isinstance(self._core, EmbeddingCore)
        requests = [self._core.text(text, inbox.sink(index)) for index, text in enumerate(texts)]
        deltas = self._run(requests, inbox, len(requests))
        with ProgressBar(len(texts)) if use_tqdm else nullcontext() as bar, closing(deltas):
            for done, (_, delta) in enumerate(deltas, start=1):
                if delta.finish_reason == "error":
                    raise not_finite()
                if bar is not None:
                    bar.update(done, 0)
        return [request.vector for request in requests if request.vector is not None]

    def stats(self) -> Stats:
        """Statistics of the engine."""
        return self._thread.stats()

    def close(self) -> None:
        """Aborts running requests, and frees the memory."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _complete(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        on_progress: OnProgress | None,
        cache_salt: str,
        priority: Priority,
        on_output: OnOutput | None = None,
        lora_request: Adapter = None,
    ) -> list[RequestOutput]:
        if on_progress is not None and not callable(on_progress):
            raise UsageError(f"on_progress is {shorten(on_progress)}", "it must be a function of two numbers")
        refuse_answers(self.engine)
        inbox, num = _Inbox(), len(prompts)
        adapters = _adapters_of(lora_request, num, self._core)
        each = zip(prompts, self._params(sampling_params, num), _works(priority, num), adapters, strict=True)
        collectors = [
            self._collector(prompt, params, inbox.sink(index), cache_salt, work, adapter)
            for index, (prompt, params, work, adapter) in enumerate(each)
        ]
        requests = [collector.request for collector in collectors]
        deltas = self._run(requests, inbox, sum(request.params.n for request in requests))
        num_done = num_tokens = 0
        with ProgressBar(len(prompts)) if use_tqdm else nullcontext() as bar, closing(deltas):
            for index, delta in deltas:
                collectors[index].add(delta)
                num_tokens += len(delta.tokens)
                if delta.finish_reason is not None and collectors[index].finished:
                    num_done += 1
                    if on_output is not None:
                        on_output(index, collectors[index].output())
                if bar is not None:
                    bar.update(num_done, num_tokens)
                if on_progress is not None:
                    on_progress(num_done, num_tokens)
        return [collector.output() for collector in collectors]

    def _collector(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sink: OutputSink,
        cache_salt: str,
        work: WorkClass,
        adapter: AdapterFile | None,
    ) -> Collector:
        """Makes the request of a prompt, and the collector of its deltas."""
        ids = self.encode(prompt)
        assert isinstance(self._core, EngineCore), "engines of other kinds are refused in _complete"
        request = self._core.request(ids, params, sink, salt_of(prompt, cache_salt), work=work, adapter=adapter)
        return Collector(str(next(self._request_ids)), text_of(prompt), ids, request, self.engine.tokenizer)

    def _run(
        self, requests: Sequence[AnyRequest], inbox: "_Inbox", num_choices: int
    ) -> Generator[tuple[int, Delta], None, None]:
        """Runs requests until all choices have ended; closed early, it aborts them.

        Yields:
            The index of a request and a delta of it, as they arrive.
        """
        try:
            for request in requests:
                self._thread.submit(request)
            while num_choices:
                index, delta = inbox.get()
                num_choices -= delta.finish_reason is not None
                yield index, delta
        finally:
            if num_choices:
                for request in requests:
                    self._thread.abort(request)

    def _params(self, given: Params, count: int) -> list[SamplingParams]:
        if not isinstance(given, list | tuple):
            return [params_of(given, self.engine)] * count  # type: ignore[arg-type]
        if len(given) != count:
            raise UsageError(f"{len(given)} sampling_params for {count} prompts", fix="Give one, or one for each.")
        return [params_of(one, self.engine) for one in given]


class DeltaStream:
    """Iterator over the deltas of one request; closed or garbage-collected early, it aborts the request.

    Args:
        inbox: receives the deltas.
        num_choices: the number of choices of the request.
        abort: aborts the request.
    """

    def __init__(self, inbox: "_Inbox", num_choices: int, abort: Callable[[], None]) -> None:
        self._inbox, self._left, self._abort = inbox, num_choices, abort

    def __iter__(self) -> "DeltaStream":
        return self

    def __next__(self) -> Delta:
        if not self._left:
            raise StopIteration
        _, delta = self._inbox.get()
        self._left -= delta.finish_reason is not None
        return delta

    def abort(self) -> None:
        """Ends the request early, from any thread or a signal handler; its last delta then says so."""
        self._abort()

    def close(self) -> None:
        """Aborts the request if it has not ended."""
        if self._left:
            self._left = 0
            self._abort()

    def __del__(self) -> None:
        self.close()


class _Inbox:
    """Deltas of several requests, for a thread that waits for them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, Delta | EngineError]] = SimpleQueue()

    def sink(self, index: int) -> OutputSink:
        """Output sink of the request with this index."""
        return lambda item: self._queue.put((index, item))

    def get(self) -> tuple[int, Delta]:
        """The next delta and the index of its request. Raises EngineDeadError if no more will come."""
        index, item = self._queue.get()
        if isinstance(item, EngineError):
            raise item
        return index, item


def _works(priority: Priority, count: int) -> list[WorkClass]:
    """Priorities of the prompts."""
    if not isinstance(priority, list | tuple):
        return [WorkClass(0 if priority is None else priority)] * count  # type: ignore[arg-type]
    if len(priority) != count:
        raise UsageError(f"{len(priority)} priorities for {count} prompts", fix="Give one, or one for each.")
    return [WorkClass(one) for one in priority]


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """List of prompts from one prompt or several."""
    if isinstance(prompts, str | Mapping | Conversation):
        return [prompts]
    if not is_list(prompts):
        raise UsageError(f"the prompts are {shorten(prompts)}", "they must be a text, token ids, or a list of prompts")
    if len(prompts) > 0 and all(isinstance(one, Integral) for one in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _adapters_of(given: Adapter, count: int, core: object) -> Sequence[AdapterFile | None]:
    """Opens the adapters of some prompts.

    Args:
        given: the adapter of all prompts, or one for each.
        count: number of prompts.
        core: core of the engine.

    Raises:
        UsageError: the number of adapters is another one, or an adapter does not fit the engine.
        EngineError: a file cannot be read.
    """
    if given is None:
        return [None] * count
    wanted: list[object] = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(wanted) != count:
        raise UsageError(f"lora_request has {len(wanted)} adapters", f"there are {count} prompts")
    return [None if one is None else _open_adapter(one, core) for one in wanted]


def _open_adapter(wanted: object, core: object) -> AdapterFile:
    if not isinstance(wanted, LoRARequest):
        raise UsageError(f"lora_request is {shorten(wanted)}", "it must be a LoRARequest")
    if not wanted.lora_path:
        raise UsageError(f"the adapter {wanted.lora_name} has no file", "lora_path is empty")
    if not isinstance(core, EngineCore):
        raise UsageError(f"the adapter {wanted.lora_name} cannot be used", "the engine generates no text")
    return core.open_adapter(Path(wanted.lora_path))
