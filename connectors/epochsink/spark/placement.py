"""Find what decides on the value of an SQL expression besides a key: a row's place must follow from its key.

Spark's plan does not tell all of it. Its parser has replaced DATE'today' by a constant, and in a plan of Spark Connect,
which shows none, `curdate()` and a subquery are constants too. So the words of the expression are looked at first: they
have to be columns, or what is known to give the same value each time. Then the texts that become dates or timestamps:
Spark takes a text without a column, such as 'to' || 'day', for a day of its clock, and any text that is a time alone
for one of today. Then Spark says which columns matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NO_KEY: Final = "MISSING_AGGREGATION"
_WITHOUT_TEXT: Final = ("array", "map", "struct", "variant")
"""Types of which different values may have the same text."""

_SAME_EACH_TIME: Final = """
    abs acos acosh add_months aes_decrypt aggregate array array_append array_compact array_contains array_distinct
    array_except array_insert array_intersect array_join array_max array_min array_position array_prepend
    array_remove array_repeat array_size array_sort array_union arrays_overlap arrays_zip ascii asin asinh atan
    atan2 atanh base64 bigint bin binary bit_count bit_get bit_length bitmap_bit_position bitmap_bucket_number
    bitmap_count boolean bround btrim cardinality cast cbrt ceil ceiling char char_length character_length chr
    coalesce collate collation concat concat_ws contains conv convert_timezone cos cosh cot crc32 csc date date_add
    date_diff date_format date_from_unix_date date_part date_sub date_trunc dateadd datediff datepart day dayname
    dayofmonth dayofweek dayofyear decimal decode degrees double e element_at elt encode endswith equal_null exists
    exp expm1 extract factorial filter find_in_set flatten float floor forall format_number format_string
    from_base32 from_csv from_json from_unixtime from_utc_timestamp from_xml get get_json_object getbit greatest
    hash hex hmac hour hypot if ifnull initcap instr int is_valid_utf8 is_valid_variant is_variant_null isnan
    isnotnull isnull jaro_winkler_similarity json_array_length json_object_keys last_day lcase least left len length
    levenshtein ln locate log log10 log1p log2 lower lpad ltrim luhn_check make_date make_dt_interval make_interval
    make_time make_timestamp make_timestamp_ltz make_timestamp_ntz make_valid_utf8 make_ym_interval map map_concat
    map_contains_key map_entries map_filter map_from_arrays map_from_entries map_keys map_values map_zip_with mask
    md5 minute mod month monthname months_between named_struct nanvl negative next_day nullif nullifzero nvl nvl2
    octet_length overlay parse_json parse_url pi pmod position positive pow power printf quarter quote radians
    reduce regexp_count regexp_extract regexp_extract_all regexp_instr regexp_like regexp_replace regexp_substr
    repeat replace reverse right rint round rpad rtrim
    sec second sentences sequence sha sha1 sha2 shiftleft shiftright shiftrightunsigned sign signum sin sinh size
    slice smallint sort_array soundex space split split_part sqrt startswith str_to_map string struct substr
    substring substring_index tan tanh time time_bucket time_diff time_from_micros time_from_millis
    time_from_seconds time_to_micros time_to_millis time_to_seconds time_trunc timestamp timestamp_micros
    timestamp_millis timestamp_nanos timestamp_seconds tinyint to_base32 to_binary to_char to_csv to_date to_json
    to_number to_time to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_utc_timestamp to_varchar
    to_variant_object to_xml transform transform_keys transform_values translate trim trunc try_add try_aes_decrypt
    try_divide try_element_at try_make_interval try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz
    try_mod try_multiply try_parse_json try_parse_url try_subtract try_to_binary try_to_date try_to_number
    try_to_time try_to_timestamp try_url_decode try_validate_utf8 try_variant_array_append try_variant_get
    try_variant_insert try_variant_set typeof ucase unbase64 unhex unix_date unix_micros unix_millis unix_nanos
    unix_seconds upper url_decode url_encode validate_utf8 variant_array_append variant_delete variant_get
    variant_insert variant_set variant_strip_nulls vector_cosine_similarity vector_inner_product vector_l2_distance
    vector_norm vector_normalize weekday weekofyear width_bucket xpath xpath_boolean xpath_double xpath_float
    xpath_int xpath_long xpath_number xpath_short xpath_string xxhash64 year zeroifnull zip_with
"""
_FUNCTIONS: Final = frozenset(_SAME_EACH_TIME.split())
"""Functions of Spark's that give the same value each time for the same arguments."""
_OPERATORS_TYPES_UNITS: Final = """
    all and any as between both case collate dec distinct div else end escape false for from ilike in interval is
    leading like local not null numeric or regexp rlike some then to trailing true when with without zone
    byte character integer long real short timestamp_ltz timestamp_ntz varchar variant void
    centuries century days decade decades dow doy epoch hours isodow isoyear microsecond microseconds millennium
    millisecond milliseconds minutes months nanosecond nanoseconds quarters seconds week weeks years yearofweek
"""
_WORDS: Final = frozenset(_OPERATORS_TYPES_UNITS.split())
"""Other words of expressions."""
_OF_THE_MOMENT: Final = re.compile(r"\s*(now|today|tomorrow|yesterday)\b.*", re.IGNORECASE | re.DOTALL)
"""Texts that Spark takes for a time of its own clock where a date or a timestamp is expected."""
_DATED: Final = re.compile(r"\s*[+-]?\d{4,}(-.*)?", re.DOTALL)
"""Texts of dates and timestamps that say their day: a time alone is one of today."""
_TIMES: Final = frozenset({"date", "timestamp", "timestamp_ltz", "timestamp_ntz"})
_TIME: Final = re.compile(r"\b(date|timestamp\w*)\b(?!:)")
_TEXT: Final = re.compile(r"\b(string|char|varchar|variant)\b(?!:)")
"""Types in the words of Spark; the name of a field has a colon after it."""
_TIME_OF_DAY: Final = re.compile(r"\s*([tT]\d|\d+:)")
"""How a text begins that says no day: Spark takes today's."""
_DATES_OF: Final = """
    add_months date date_sub day dayname dayofmonth dayofweek dayofyear last_day month monthname next_day quarter
    to_date trunc try_to_date weekday weekofyear year
"""
_TIMESTAMPS_OF: Final = """
    convert_timezone date_add date_diff date_format date_part date_trunc dateadd datediff datepart extract
    from_utc_timestamp hour make_timestamp make_timestamp_ltz make_timestamp_ntz minute months_between second
    time_bucket timestamp to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_utc_timestamp
    try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz try_to_timestamp unix_date unix_micros
    unix_millis unix_nanos unix_seconds
"""
_TAKE_DATES: Final = frozenset(_DATES_OF.split())
_TAKE_TIMESTAMPS: Final = frozenset(_TIMESTAMPS_OF.split())
"""Functions that make a date, or a timestamp, of a text."""
_READ: Final = frozenset({"from_csv", "from_json", "from_xml", "try_variant_get", "variant_get"})
"""Functions whose first argument is read as the types say that another one names."""
_WITH_FORMAT: Final = {
    head for head in _TAKE_DATES | _TAKE_TIMESTAMPS if re.match(r"(try_)?to_(date|timestamp|unix)", head)
}
"""Those that take a format, and then make a time of what it says only."""
_OF_ANY_TYPE: Final = frozenset({"concat", "concat_ws", "format_string", "hash", "printf", "xxhash64"})
"""Functions that take texts beside times, and make neither of the other."""

_TOKEN: Final = re.compile(
    r"""(?P<gap>\s+|--[^\n]*|/\*.*?\*/)
    |(?P<text>[rR]'[^']*'|[rR]"[^"]*"|[xXbB]?'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
    |(?P<name>`(?:[^`]|``)*`)
    |(?P<number>\.?\d\w*(?:\.\d*)?(?:[eE][+-]?\d+)?\w*)
    |(?P<word>[^\W\d]\w*)
    |(?P<sign>->|=>|::|\|\||.)""",
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int = 0

    @property
    def name(self) -> str:
        """The name that it is, or would be: Spark's names do not depend on case."""
        if self.kind == "name":
            return self.text[1:-1].replace("``", "`").lower()
        return self.text.lower()

    @property
    def value(self) -> str:
        """What is between its quotes."""
        return self.text.strip("rRxXbB").strip("'\"")


_NOTHING: Final = _Token("", "")


def unsettled(expression: str, columns: Iterable[str]) -> list[str]:
    """Return the parts of an expression that are neither one of the columns nor known to be the same each time."""
    tokens = _tokens(expression)
    known = {name.lower() for name in columns} | _parameters(tokens)
    around = zip([_NOTHING, *tokens], tokens, [*tokens[1:], _NOTHING], strict=False)
    parts = (each.text for before, each, after in around if not _is_settled(before, each, after, known))
    return list(dict.fromkeys(parts))


def _tokens(expression: str) -> list[_Token]:
    tokens = (_Token(str(each.lastgroup), each[0], each.start()) for each in _TOKEN.finditer(expression))
    return [token for token in tokens if token.kind != "gap"]


def _is_settled(before: _Token, each: _Token, after: _Token, known: set[str]) -> bool:
    if each.kind == "text":
        if before.name in _TIMES and not _DATED.fullmatch(each.value):
            return False
        # such as "rand"(), where a session takes double quotes for those of a name
        return after.text != "(" and not _OF_THE_MOMENT.fullmatch(each.value)
    if each.kind not in ("word", "name"):
        return True
    if after.text == "(" and not (each.kind == "word" and each.name in _WORDS):
        return before.text != "." and each.name in _FUNCTIONS
    if before.text == "." or after.text == "=>" or before.name == "collate" or each.name in known:
        return True
    # types and units are called like functions: date, year
    return each.kind == "word" and (each.name in _WORDS or each.name in _FUNCTIONS)


def _parameters(tokens: Sequence[_Token]) -> set[str]:
    """Return the names that lambda functions give to their parameters."""
    parameters: set[str] = set()
    for place, token in enumerate(tokens):
        if token.text == "->":
            start = place - 1
            if tokens[start].text == ")":
                while start > 0 and tokens[start].text != "(":
                    start -= 1
            parameters |= {each.name for each in tokens[max(start, 0) : place] if each.kind in ("word", "name")}
    return parameters


def texts_as_times(frame: DataFrame, expression: str) -> list[str]:
    """Return the texts of an expression that Spark may take for a time of its own clock: computed ones, and columns.

    They are those that become a timestamp, and those that become a date and have no column in them.
    """
    tokens = _tokens(expression)
    parameters = _parameters(tokens)
    columns = {name.lower() for name in frame.columns} | parameters
    texts: list[str] = []
    for head, parts in _lists("", tokens, expression):
        types = [
            _type(frame, part, parameters) if part.kind == "call" or part.name in columns else "" for part in parts
        ]
        times = " ".join([*types, *_expected(head, parts)])
        if not _TIME.search(times) or _leaves_texts(head, parts, types):
            continue
        for part, type_ in zip(parts, types, strict=True):
            if part.kind == "text":
                loose = _TIME_OF_DAY.match(part.value) is not None or (head in _READ and part is parts[0])
            else:
                loose = _TEXT.search(type_) is not None
            if loose and ("timestamp" in times or not any(each.name in columns for each in _tokens(part.text))):
                texts.append(part.text)
    return list(dict.fromkeys(texts))


def _lists(head: str, tokens: Sequence[_Token], expression: str) -> Iterator[tuple[str, list[_Token]]]:
    """Yield the arguments of each function with its name, and the whole; calls and joined texts are one part each."""
    parts: list[_Token] = []
    place = 0
    while place < len(tokens):
        token = tokens[place]
        if token.text == "(":
            end = _closing(tokens, place)
            before = parts[-1] if parts else _NOTHING
            is_call = before.kind in ("word", "name") and before.name in _FUNCTIONS
            yield from _lists(before.name if is_call else "", tokens[place + 1 : end], expression)
            token = _from_to(parts.pop() if is_call else token, tokens[end], expression)
            place = end
        parts.append(token)
        place += 1
    joined: list[_Token] = []
    for part in parts:
        if len(joined) > 1 and joined[-1].text in (".", "||"):
            joined.pop()
            part = _from_to(joined.pop(), part, expression)  # noqa: PLW2901 - it goes on
        joined.append(part)
    yield head, joined


def _from_to(first: _Token, last: _Token, expression: str) -> _Token:
    return _Token("call", expression[first.start : last.start + len(last.text)], first.start)


def _closing(tokens: Sequence[_Token], place: int) -> int:
    depth = 0
    for end in range(place, len(tokens)):
        depth += (tokens[end].text == "(") - (tokens[end].text == ")")
        if depth == 0:
            return end
    return len(tokens) - 1


def _type(frame: DataFrame, part: _Token, parameters: set[str]) -> str:
    try:
        # of a parameter of a lambda function, whose name a column may have too, nothing is known
        if part.name in parameters:
            return "string"
        return str(frame.selectExpr(part.text).schema[0].dataType.simpleString())
    except AnalysisException:
        # it has such a parameter in it, or is a part of something else
        return "string"


def _expected(head: str, parts: Sequence[_Token]) -> list[str]:
    """Return what says which times are made in a list: by its function, a cast, literals, and the schema to read."""
    names = [part.name for part in parts]
    cast = min((names.index(each) for each in ("as", "::") if each in names), default=len(names))
    literals = [each.name for each, after in pairwise(parts) if after.kind == "text" and each.name in _TIMES]
    schema = [name for name, part in zip(names, parts, strict=True) if part.kind == "text" and head in _READ]
    taken = ["timestamp"] * (head in _TAKE_TIMESTAMPS) + ["date"] * (head in _TAKE_DATES)
    return [*taken, *names[cast:], *literals, *schema]


def _leaves_texts(head: str, parts: Sequence[_Token], types: Sequence[str]) -> bool:
    """Return whether a function makes no time of a text: of any arguments, or by a format, which has no words."""
    texts = [part.text.lower() for part in parts]
    if head in _WITH_FORMAT:
        return "," in texts
    return head in _OF_ANY_TYPE and not ({"as", "::"} & set(texts) or any("array" in each for each in types))


def loose_columns(frame: DataFrame, expression: str, key: Sequence[str]) -> list[str]:
    """Return a column of a frame, in a list, on which the value of an expression depends besides those of ``key``."""
    # a number in GROUP BY is a position
    texts = [each for each in key if not each.strip().isdigit()]
    fields = frame.selectExpr(*texts).schema.fields if texts else []
    # The key is a text, and different structs, arrays and maps may have the same one.
    decided = [
        F.expr(each)
        for each, field in zip(texts, fields, strict=True)
        if not field.dataType.typeName().startswith(_WITHOUT_TEXT)
    ]
    try:
        # in an aggregation by the key, Spark refuses what is not the same for all rows of a group
        _ = frame.groupBy(*decided, F.lit("all")).agg(F.expr(expression).alias("value")).schema
    except AnalysisException as refused:
        if refused.getCondition() != _NO_KEY:
            raise
        parameters: dict[str, Any] = dict(refused.getMessageParameters() or {})
        return [str(parameters.get("expression", "a column")).strip('"')]
    return []
