"""JSON schemas for tests: random ones, and as the engine takes them."""

from hypothesis import strategies as st
from llguidance import LLMatcher


def json_grammar(schema):
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=6)
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-999, 999), st.integers(0, 5000)
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.one_of(_TEXT, st.integers(-9, 99), st.booleans()), min_size=1, max_size=4)
    ),
    st.sampled_from(
        [{"type": "string", "pattern": "^[a-f]{1,4}$"}, {"type": "string", "format": "date"}, {"const": {"a": [1, None]}}]
    ),
)


@st.composite
def _objects(draw, parts):
    properties = draw(st.dictionaries(_TEXT, parts, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _arrays(parts):
    return st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        parts,
        st.integers(0, 2),
        st.integers(0, 3),
    )


def schemas():
    """Of objects, arrays and unions of a few levels. What they describe is finite, so that most answers end."""
    return st.recursive(
        _LEAVES,
        lambda parts: st.one_of(
            _objects(parts), _arrays(parts), st.builds(lambda these: {"anyOf": these}, st.lists(parts, min_size=1, max_size=3))
        ),
        max_leaves=8,
    )
