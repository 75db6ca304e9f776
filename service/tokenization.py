"""Text to token ids and back, and chats to text, from a model's folder: without torch, without transformers.

Importing transformers' tokenizer classes imports torch (2.3 s); ``tokenizers`` and Jinja2 take 0.02 s and give the same ids.
Everything here is synchronous and thread-safe: the api calls it in threads, since a long prompt takes long.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.grammar import Grammars
from service.errors import ServiceError
from service.token_bytes import bytes_of_tokens

#: Names that config.json files use for the longest sequence, by model family.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")


class TokenizerInvalid(ServiceError):
    """The model's folder lacks what is needed to turn text into tokens."""


class ChatTemplateError(Exception):
    """These messages cannot be rendered: the model has no template, or its template refused them."""


class Tokenization:
    """A model's tokenizer, chat template, context length and end-of-text tokens.

    Raises ``TokenizerInvalid`` when ``folder`` has no readable tokenizer.json and config.json.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "config.json")
        config = {**config, **config.get("text_config", {})}
        settings = _read_json(folder / "tokenizer_config.json", missing_ok=True)
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        self.context_length = _context_length(config, folder)
        #: Rows of the embedding: ids from here on have no meaning to the model.
        self.vocab_size = int(config.get("vocab_size") or self._tokenizer.get_vocab_size())
        self.eos_token_ids = self._end_tokens(folder, config)
        self._special_tokens = _special_tokens(settings)
        self.template_source = _template_source(folder, settings) or ""  #: of the chat template; "": the model has none
        environment = _environment()
        self._template = environment.from_string(self.template_source) if self.template_source else None
        #: What the chat template asks for.
        self.template_variables = frozenset(meta.find_undeclared_variables(environment.parse(self.template_source)))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {found.content: token for token, found in added.items()}
        self._hidden = {token: found.content for token, found in added.items() if found.special}
        self.token_bytes = bytes_of_tokens(self._tokenizer)

    def _end_tokens(self, folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
        generation = _read_json(folder / "generation_config.json", missing_ok=True)
        found = generation.get("eos_token_id", config.get("eos_token_id"))
        if found is None:
            return ()
        return tuple(int(token) for token in found) if isinstance(found, list) else (int(found),)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with whatever the tokenizer puts around one (a begin-of-text token, for some models)."""
        return self._ids(text, add_special_tokens=True)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: bool,
    ) -> str:
        """The text that stands for this chat; ``variables`` of the template's own. Raises ``ChatTemplateError``."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: send a plain `prompt` to /v1/jobs or /v1/completions")
        given = {
            **variables,
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": None,
        }
        try:
            return self._template.render(**given, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error.message}") from error
        except (
            TypeError,
            ValueError,
            LookupError,
        ) as error:  # a template meeting a shape of message that its author did not foresee
            raise ChatTemplateError(f"the model's chat template cannot render these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer. Raises ``ChatTemplateError``."""
        return self.encode_rendered(self.render_chat(messages))

    def encode_rendered(self, chat: str) -> list[int]:
        """Token ids of what ``render_chat`` made, which has all its special tokens already."""
        return self._ids(chat, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As a batch of one: the library's ``encode`` keeps the interpreter to itself, its batches let the event loop run.

        Measured on a prompt of 1 MiB (220,000 tokens): no other thread ran for 3.6 s, and for 0.03 s as a batch.
        """
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Grammars over this model's tokens, as its engines have them."""
        return Grammars(self._tokenizer, self.vocab_size, self.eos_token_ids)

    def token_text(self, token: int) -> str:
        """A token on its own, as text; what is no whole character shows as the replacement character."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def added_token(self, text: str) -> int | None:
        """The one token that says exactly this and is no part of a text's own words, special or not; None: there is none."""
        return self._added.get(text)

    def text(self, tokens: Sequence[int]) -> str:
        """What these tokens say together, without special ones, as a job's text is shown."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def hidden_text(self, token: int) -> str:
        """What a special token says and a job's text leaves out; empty for all others."""
        return self._hidden.get(token, "")


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise TokenizerInvalid(f"no {path.name} in {path.parent}", "give the model's whole folder") from error
    except (OSError, ValueError) as error:
        raise TokenizerInvalid(f"cannot read {path}: {error}", "fetch the model again") from error
    if not isinstance(content, dict):
        raise TokenizerInvalid(f"{path} does not hold a JSON object", "fetch the model again")
    return content


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerInvalid(f"no tokenizer.json in {path.parent}", "give a model with a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerInvalid(f"cannot read {path}: {error}", "fetch the model again") from error
    # Some files carry the settings of a training run: a prompt must neither be cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _context_length(config: Mapping[str, Any], folder: Path) -> int:
    for key in _CONTEXT_KEYS:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise TokenizerInvalid(f"{folder / 'config.json'} does not say how long a context may be", f"add {_CONTEXT_KEYS[0]}")


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The variables like ``bos_token`` that templates use. A value is a string or, in older files, an object with ``content``."""
    tokens: dict[str, Any] = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named ones: the one for plain chats is called "default"
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; when rendering, it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The environment chat templates are written for: transformers' ``render_jinja_template`` sets the same options and names.

    Sandboxed and immutable: a template comes with a model, from anywhere.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    names: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(names)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
