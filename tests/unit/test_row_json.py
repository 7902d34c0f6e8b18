"""What JSON of a row cannot hold is refused before any row moves."""

from __future__ import annotations

import pyarrow as pa
import pytest

from epochsink.errors import ConfigurationError
from epochsink.sink.row_json import value_json


@pytest.mark.parametrize("key", [pa.binary(), pa.struct([("a", pa.int32())])])
def test_a_map_whose_keys_have_no_text_of_their_own_is_refused(key: pa.DataType) -> None:
    """Spark writes them as the name of a Java object with its address, another one in every run."""
    kind = pa.struct([("deep", pa.list_(pa.map_(key, pa.string())))])
    with pytest.raises(ConfigurationError, match="keys whose text is not the same in every run") as refused:
        value_json("r", kind)
    assert "transform_keys" in refused.value.hint


def test_a_map_with_other_keys_is_rendered() -> None:
    assert value_json("r", pa.struct([("m", pa.map_(pa.int64(), pa.string()))])).startswith("to_json(r")
