"""The lab's placement checks each schema once, and every request against its schema."""

from __future__ import annotations

from typing import Any

import pytest

from ecomp.lab.placement_server import check_schemas_once

jsonschema = pytest.importorskip('jsonschema', reason="placement is not installed: pip install '.[lab]'")

WHOLE_NUMBER = {'type': 'integer', 'minimum': 1}


@pytest.fixture
def checked_schemas(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The list of schemas that were checked, in order."""
    validator = jsonschema.validators.validator_for({})
    check, schemas = validator.check_schema, []

    def record_schema(schema: Any, *rest: Any, **named: Any) -> None:
        schemas.append(schema)
        check(schema, *rest, **named)

    monkeypatch.setattr(validator, 'check_schema', record_schema)
    check_schemas_once()
    return schemas


def test_schema_is_checked_at_its_first_use_only(checked_schemas: list[Any]) -> None:
    for _ in range(3):
        jsonschema.validate(3, WHOLE_NUMBER)
    assert checked_schemas == [WHOLE_NUMBER]
    jsonschema.validate('x', {'type': 'string'})
    assert checked_schemas == [WHOLE_NUMBER, {'type': 'string'}]


@pytest.mark.usefixtures('checked_schemas')
def test_invalid_data_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(0, WHOLE_NUMBER)


@pytest.mark.usefixtures('checked_schemas')
def test_invalid_schema_is_refused_each_time() -> None:
    nonsense = {'type': 'no such type'}
    for _ in range(2):
        with pytest.raises(jsonschema.SchemaError):
            jsonschema.validate(3, nonsense)
