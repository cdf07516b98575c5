"""The page at / in a real browser: a chat with a real model, and tools and reasoning with a tiny one."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import FOLDER, browser, opened
from tests.helpers.serving import Running, exactly, running, wait_until

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
SCREENSHOT = ROOT / "build/page.png"  # docs/assets/page.png is one of these
LIMITS = {"max_model_len": 2048, "kv_cache_memory": 256 << 20}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "look")]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LONG = "Tell a very long story about a sailor and her boat."


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    assert ENGINE.is_file(), "run `make test-long`, which builds it"
    with running(engine=ENGINE, limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    with running(kind="calls tools") as server:
        yield server


def address(server: Running) -> str:
    return f"http://localhost:{server.port}/"


def ask(page: Any, text: str) -> Any:
    """Send a message; its answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    return page.locator("article.assistant").last


def ended(page: Any) -> None:
    page.get_by_role("button", name="Stop").and_(page.locator(":disabled")).wait_for(timeout=60_000)


def sent(page: Any, text: str | None = None) -> list[dict[str, Any]]:
    """Records the bodies that the page sends from now on. With a text, a grammar makes every completion that text."""
    bodies: list[dict[str, Any]] = []

    def pass_on(route: Any) -> None:
        body = route.request.post_data_json
        bodies.append(body)
        wanted = {} if text is None else {"structured_outputs": exactly(text)}
        route.continue_(post_data=json.dumps(body | wanted))

    page.route("**/v1/chat/completions", pass_on)
    return bodies


def test_a_conversation(chromium: Any, real: Running) -> None:
    with opened(chromium, address(real)) as page:
        bodies = sent(page)
        page.get_by_text("Settings").click()
        page.get_by_label("System prompt").fill("You are a helpful assistant.")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("60")
        answer = ask(page, "What is the capital of France?")
        ended(page)
        assert "Paris" in answer.inner_text() and re.search(r"\d+ tokens, first after .* tokens/s", answer.inner_text())
        assert "Paris" in page.get_by_role("status").inner_text()  # said once, at the end
        first = answer.inner_text()
        ask(page, "And of Italy?")
        ended(page)
        system, *others = bodies[1]["messages"]
        assert system == {"role": "system", "content": "You are a helpful assistant."}
        assert [message["role"] for message in others] == ["user", "assistant", "user"]
        assert others[1]["content"] in first and (bodies[1]["temperature"], bodies[1]["max_tokens"]) == (0, 60)

        page.get_by_role("button", name="Regenerate").last.click()
        ended(page)
        assert bodies[2]["messages"] == bodies[1]["messages"]
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Your message").fill("What is the capital of Spain?")
        page.locator("article.user").first.get_by_role("button", name="Send").click()
        ended(page)
        assert [message["content"] for message in bodies[3]["messages"]][1:] == ["What is the capital of Spain?"]
        assert page.locator("article").count() == 2

        page.get_by_role("button", name="New conversation").click()
        assert page.locator("article").count() == 0
        page.get_by_role("button", name="What is the capital of Spain?", exact=True).click()
        assert page.locator("article").count() == 2
        page.get_by_label("Keep them in this browser").check()
        page.reload()
        assert page.locator("article").count() == 2
        page.get_by_role("button", name="Delete all").click()
        page.reload()
        assert page.locator("article").count() == 0


def test_an_answer_grows_and_is_stopped(chromium: Any, real: Running) -> None:
    with opened(chromium, address(real)) as page:
        text = ask(page, LONG).locator(".markdown")
        lengths = []
        for _ in range(3):
            page.wait_for_function(
                "n => document.querySelector('.markdown')?.innerText.length > n", arg=max(lengths or [0])
            )
            lengths.append(len(text.inner_text()))
        assert page.get_by_label("Messages").get_attribute("aria-busy") == "true"
        page.keyboard.press("Escape")
        page.get_by_text("You have stopped the answer.").wait_for()
        assert len(text.inner_text()) > lengths[0] > 0
        wait_until(real.is_idle)  # the server does not go on either


def test_charts_move(chromium: Any, real: Running) -> None:
    size = {"width": 1280, "height": 800}
    with opened(chromium, address(real), viewport=size) as page, ThreadPoolExecutor(4) as others:
        loads = [others.submit(real.complete, f"Story {n}:", max_tokens=250) for n in range(8)]
        ask(page, "Give three tips, as a list in Markdown, for how to learn a language.")
        throughput = page.get_by_role("img", name=re.compile("Throughput: generated now [1-9]"))
        throughput.wait_for(timeout=30_000)
        drawn = throughput.locator("path.line-0").get_attribute("d")
        page.get_by_role("img", name=re.compile("Batch and queue: running now [1-9]")).wait_for()
        page.get_by_role("img", name=re.compile("KV cache: in use now 0?.*[1-9]")).wait_for()
        page.get_by_role("img", name=re.compile("Time to first token: mean now .*s, 95th")).wait_for()
        page.wait_for_function("d => document.querySelector('path.line-0').getAttribute('d') !== d", arg=drawn)
        ended(page)
        ask(page, "And how do I keep it up?")
        ended(page)
        for load in loads:
            load.result()
        SCREENSHOT.parent.mkdir(exist_ok=True)
        page.screenshot(path=SCREENSHOT)
        page.get_by_text("The same as a table").click()
        row = page.get_by_role("row", name=re.compile("Inter-token latency, mean"))
        assert re.fullmatch(
            r"(\d[\d.]* m?s|–) \d[\d.]* m?s \d[\d.]* m?s", " ".join(row.locator("td").all_inner_texts())
        )


def test_reasoning_is_folded_and_calls_are_answered(chromium: Any, tiny: Running) -> None:
    with opened(chromium, address(tiny)) as page:
        bodies = sent(page, f"<think>\nHm.\n</think>\n\nI **add**.\n{CALL}\n{CALL}")
        page.get_by_text("Settings").click()
        page.get_by_label("Tools").fill("[{")
        ask(page, "Add.")
        assert "The tools are not JSON" in page.get_by_role("alert").inner_text() and not bodies
        page.get_by_label("Tools").fill(json.dumps(TOOLS))
        page.get_by_label("Message", exact=True).press("Enter")
        ended(page)
        answer = page.locator("article.assistant")
        assert bodies[0]["tools"] == TOOLS and "tool_choice" not in bodies[0]
        assert not answer.get_by_text("Hm.").is_visible()
        answer.get_by_text("Reasoning").click()
        assert answer.get_by_text("Hm.").is_visible()
        assert answer.locator("strong").inner_text() == "add"
        calls = answer.get_by_role("region", name="Call of add")
        assert calls.count() == 2 and '"a": 1' in calls.first.inner_text()

        page.unroute_all()
        bodies = sent(page, "It is 3.")
        for result in ("2", "3"):
            answer.get_by_label("Result of add").first.fill(result)
            answer.get_by_role("button", name="Give result").first.click()
        page.get_by_text("It is 3.", exact=True).wait_for()
        user, called, *results = bodies[0]["messages"]
        assert len(bodies) == 1 and user["content"] == "Add." and called["reasoning_content"].strip() == "Hm."
        ids = [call["id"] for call in called["tool_calls"]]
        assert [(one["tool_call_id"], one["content"]) for one in results] == list(zip(ids, ("2", "3"), strict=True))


def test_a_key_and_errors_in_words(chromium: Any) -> None:
    with running(api_keys=("key",), max_num_waiting=1) as server, opened(chromium, address(server)) as page:
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use key").click()
        alert = page.get_by_role("alert")
        page.get_by_text("Incorrect API key provided").first.wait_for()
        page.get_by_label("API key").fill("key")
        page.keyboard.press("Enter")
        page.get_by_label("API key").wait_for(state="hidden")
        assert alert.inner_text() == "" and page.get_by_label("Model", exact=True).input_value() == "tiny"
        page.get_by_role("img", name=re.compile("running now 0")).wait_for()
        page.reload()  # the tab still knows it
        page.get_by_role("img", name=re.compile("running now 0")).wait_for()
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("3")
        ask(page, "Hello")
        assert "Temperature: Value must be less than or equal to 2" in alert.inner_text()
        page.get_by_label("Temperature").fill("")
        page.get_by_label("Message", exact=True).fill("word " * 5000)
        page.get_by_role("button", name="Send").click()
        page.locator("article.assistant .error").wait_for()
        assert "4096" in page.locator("article.assistant .error").inner_text()
        page.context.set_offline(True)
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_text("The server cannot be reached. Is it running?").last.wait_for()
        page.context.set_offline(False)


def test_the_models_may_come_late(chromium: Any, tiny: Running) -> None:
    with opened(chromium, address(tiny)) as page:
        sent(page, "Yes.")
        page.locator("#model option").wait_for(state="attached")
        page.evaluate("document.getElementById('model').replaceChildren()")
        ask(page, "Hello")
        page.get_by_text("Yes.", exact=True).wait_for()
        assert page.get_by_label("Model", exact=True).input_value() == "tiny"


def test_the_keyboard_is_enough(chromium: Any, tiny: Running) -> None:
    with opened(chromium, address(tiny)) as page:
        sent(page, "Yes.")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the skip link
        page.keyboard.type("One")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("Two")
        page.keyboard.press("Enter")
        page.get_by_text("Yes.", exact=True).wait_for()
        ended(page)
        assert page.locator("article.user .text").inner_text() == "One\nTwo"
        assert focused(page) == "Message"
        names = []
        for _ in range(12):
            page.keyboard.press("Shift+Tab")
            names.append(focused(page))
        order = [
            "Regenerate",
            "Copy",
            "Edit",
            "Copy",
            "Messages",
            "Settings",
            "Delete all",
            "Keep them in this browser",
        ]
        assert names[: len(order)] == order
        page.get_by_role("button", name="Edit").focus()
        page.keyboard.press("Enter")
        assert focused(page) == "Your message"
        page.keyboard.press("Escape")
        assert focused(page) == "Edit"


def focused(page: Any) -> str:
    """The name of what has the focus."""
    name: str = page.evaluate(
        "(({ariaLabel, labels, textContent}) => (ariaLabel ?? labels?.[0]?.textContent ?? textContent).trim())"
        "(document.activeElement)"
    )
    return name


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_that_axe_finds(chromium: Any, tiny: Running, scheme: str, width: int) -> None:
    """axe-core: names, roles, contrast, landmarks. It is put into the page, whose policy would keep it out."""
    size = {"width": width, "height": 740}
    with opened(chromium, address(tiny), color_scheme=scheme, viewport=size, bypass_csp=True) as page:
        sent(page, f"<think>\nHm.\n</think>\n\n# A `title`\n\n- a\n- b\n\n> c\n\n```py\nd\n```\n{CALL}")
        for panel in page.locator("details").all():
            panel.evaluate("one => (one.open = true)")
        page.get_by_label("Tools").fill(json.dumps(TOOLS))
        ask(page, "Hello")
        ended(page)
        page.locator(".reasoning summary").click()
        page.evaluate((FOLDER / "axe.min.js").read_text())
        found = page.evaluate("axe.run()")["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
        ("# A\n### B", "<h3>A</h3><h5>B</h5>"),
        (
            "**a *b*** `c*d*` _e_ f_g_h 2 * 3 * 4",
            "<p><strong>a <em>b</em></strong> <code>c*d*</code> <em>e</em> f_g_h 2 * 3 * 4</p>",
        ),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("3. a\n4. b\n\nc", '<ol start="3"><li>a</li><li>b</li></ol><p>c</p>'),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        (
            "[a](javascript:b) ![c](d) <img src=x onerror=e>",
            "<p>[a](javascript:b) ![c](d) &lt;img src=x onerror=e&gt;</p>",
        ),
        ("\\*a\\* **b", "<p>*a* **b</p>"),
        ("``a`b``", "<p><code>a`b</code></p>"),
    ],
)
def test_markdown(chromium: Any, tiny: Running, text: str, html: str) -> None:
    with opened(chromium, address(tiny)) as page:
        assert markdown(page, text) == html


def markdown(page: Any, *texts: str) -> str:
    """The HTML that the page shows for a text that has grown through `texts`."""
    html: str = page.evaluate(
        """async (texts) => {
          const { MarkdownView } = await import("/page/markdown.js");
          const view = new MarkdownView(document.createElement("div"));
          for (const text of texts) view.update(text);
          return view.container.innerHTML;
        }""",
        list(texts),
    )
    return html


def test_markdown_that_grows(chromium: Any, tiny: Running) -> None:
    """Wherever it is cut, what is shown at the end is the same; and no text takes long."""
    text = "# A\n\nb **c** `d`\n\n- e\n  1. f\n\n> g\n\n```js\nh\n\n- i\n```\n\nj"
    with opened(chromium, address(tiny)) as page:
        whole = markdown(page, text)
        assert markdown(page, *(text[:end] for end in range(len(text)))) != whole
        assert markdown(page, *(text[:end] for end in range(len(text) + 1))) == whole
        assert 'aria-label="Code in js"><code>h\n\n- i</code></pre><p>j</p>' in whole
        for odd in ("*", "**a ", "`a``", "_a *b ", "> ", "- ", "[](", "```a`", "\\", "# ", "1. a\n"):
            assert markdown(page, odd * (100_000 // len(odd)))
