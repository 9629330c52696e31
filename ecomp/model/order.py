"""An order: what was asked for of one instance, from the command line to its record. Pure.

The fields of Order are the one table of what can be asked for: each is declared with how it is read from JSON, written,
and compared with what was asked for before. In the JSON of a request, of what waits in a queue and of a record they
stand beside the others: "image", "user_id", "project_id", "query" (the placement query it came from), "stages"
({"requested": ISO time, …}), and where they were given "name", "ssh_keys" (a list of OpenSSH public keys), "user_data"
(base64: it may be gzip) or, of a set, "user_data_sha256" (it is at the key /user-data/<sha256>) and "count", and
"group" ({"name", "policy", "strict"}; in a record its name).
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, NamedTuple

from ecomp.model.allocation import LARGEST, is_amount
from ecomp.model.group import Membership, membership_from
from ecomp.model.guest_data import USER_DATA_LIMIT, SharedUserData
from ecomp.model.names import is_label

Differs = Callable[['Order'], str]


class Field(NamedTuple):
    """How a field of an order is read, written and compared.

    `parse` takes a JSON object and the field's name, and gives its value; ValueError says what is wrong. `dump` makes
    JSON of a value. `optional`: left out of the JSON where it is not given. `recorded`: a record has it, too. `differs`
    says of an order that is there what it has instead of what is asked for now; None: nobody minds. `compared`: the
    attribute that is compared, in place of the field itself. `told`: of several differences the one with the lowest
    number is said.
    """

    parse: Callable[[Mapping[str, Any], str], Any]
    dump: Callable[[Any], Any]
    optional: bool = True
    recorded: bool = True
    differs: Differs | None = None
    compared: str | None = None
    told: int = 0
    name: str = ''


def _same(value: Any) -> Any:
    return value


def text_field(data: Mapping[str, Any], name: str) -> str:
    """A field of text, '' where there is none."""
    value = data.get(name)
    if value is None:
        return ''
    if not isinstance(value, str):
        raise ValueError(f'{name}: expected text, not {type(value).__name__}')
    return value


def _text_or_none(data: Mapping[str, Any], name: str) -> str | None:
    return None if data.get(name) is None else text_field(data, name)


def _stages(data: Mapping[str, Any], name: str) -> dict[str, str]:
    stages = data.get(name, {})
    if not isinstance(stages, dict) or not all(isinstance(time, str) for time in stages.values()):
        raise ValueError(f'{name}: expected an object of times')
    return stages


def name_field(data: Mapping[str, Any], name: str = 'name') -> str | None:
    """The name that the instance was given."""
    label = text_field(data, name) or None
    if label is not None and not is_label(label):
        raise ValueError(f'{name}: {label[:80]!r} is no host name')
    return label


def _count(data: Mapping[str, Any], name: str) -> int:
    count = data.get(name, 1)
    if not is_amount(count, LARGEST) or not count:
        raise ValueError(f'{name}: {str(count)[:40]!r} is no number of instances')
    return int(count)


def _group(data: Mapping[str, Any], name: str) -> Membership | None:
    return membership_from(data.get(name))


# The next three quote nothing, whatever it holds: a reason is logged, and stands in the record.


def _ssh_keys(data: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    lines = data.get(name)
    if lines is None:
        return None
    if not isinstance(lines, list) or not all(isinstance(each, str) and each and each.isprintable() for each in lines):
        raise ValueError(f'{name}: expected a list of public keys, a line each')
    return tuple(lines)


def _sha256(data: Mapping[str, Any], name: str) -> str | None:
    digest = data.get(name)
    if digest is not None and (not isinstance(digest, str) or not re.fullmatch('[0-9a-f]{64}', digest)):
        raise ValueError(f'{name}: expected 64 hexadecimal digits')
    return digest


def _user_data(data: Mapping[str, Any], name: str) -> bytes | None:
    text = data.get(name)
    if text is None:
        return None
    try:
        decoded = binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else None
    except ValueError:
        decoded = None
    if not decoded:
        raise ValueError(f'{name}: expected base64')
    if len(decoded) > USER_DATA_LIMIT:
        raise ValueError(f'{name}: has {len(decoded)} bytes; the limit is {USER_DATA_LIMIT}')
    return decoded


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _other_project(there: Order) -> str:
    return f'of project {there.project_id}'


def _other_query(there: Order) -> str:
    return f'asked for by {there.query!r} with image {there.image}'


def _other_name(there: Order) -> str:
    return f'by the name {there.name}' if there.name else 'without a name'


def _other_group(there: Order) -> str:
    return f'in group {there.group_name}' if there.group else 'in no group'


def _other_count(there: Order) -> str:
    return f'one of {there.count} that were asked for at once' if there.count > 1 else 'asked for by itself'


def _field(
    default: Any, parse: Callable[[Mapping[str, Any], str], Any], dump: Callable[[Any], Any] = _same, **more: Any
) -> Any:
    """A field of Order, and its row; a `default` that can be called makes one."""
    how = {'default_factory': default} if callable(default) else {'default': default}
    shown = parse not in (_ssh_keys, _user_data)
    return field(**how, repr=shown, metadata={'row': Field(parse, dump, **more)})


@dataclass(frozen=True)
class Order:
    """What was asked for of one instance.

    `instance` is its uuid, `image` a URL (None: it is to be destroyed), `query` a placement query (None: not known),
    `name` its host name. `stages` says when it was requested and, once it has a compute, scheduled: ISO times.
    `ssh_keys` and `user_data` None: those of the compute's mdserver.conf. `user_data_sha256`: the user-data is at the
    key of this hash, and `user_data` is None until it was read from there. `count`: how many were asked for at once.
    """

    instance: str
    _: KW_ONLY
    image: str | None = _field(None, _text_or_none, optional=False, differs=_other_query)
    user_id: str = _field('', text_field, optional=False)
    project_id: str = _field('', text_field, optional=False, differs=_other_project, told=2)
    query: str | None = _field(None, _text_or_none, optional=False, differs=_other_query)
    stages: Mapping[str, str] = _field(dict, _stages, dict, optional=False)
    name: str | None = _field(None, name_field, differs=_other_name, told=1)
    ssh_keys: tuple[str, ...] | None = _field(
        None, _ssh_keys, list, recorded=False, differs=lambda _: 'with other ssh keys', told=6
    )
    user_data_sha256: str | None = _field(None, _sha256, recorded=False)
    user_data: bytes | None = _field(
        None,
        _user_data,
        _base64,
        recorded=False,
        differs=lambda _: 'with other user-data',
        compared='user_data_hash',
        told=5,
    )
    count: int = _field(1, _count, recorded=False, differs=_other_count, told=4)
    group: Membership | None = _field(
        None, _group, Membership._asdict, differs=_other_group, compared='group_name', told=3
    )

    def parts(self, **changed: Any) -> dict[str, Any]:
        """The fields of the order alone, by name, for something else that holds an order; some of them changed."""
        return {each.name: getattr(self, each.name) for each in fields(Order)} | changed

    @property
    def group_name(self) -> str | None:
        """The name of its group; None for none."""
        return self.group.name if self.group else None

    @property
    def user_data_hash(self) -> str | None:
        """The hash of its user-data, wherever that is; None for none."""
        return self.user_data_sha256 if self.user_data is None else SharedUserData.of(self.user_data).sha256


FIELDS = tuple(each.metadata['row']._replace(name=each.name) for each in fields(Order) if each.metadata)
"""The rows, in the order in which they are written."""


def parse_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an order in a JSON object, by name, but for the instance. ValueError says what is wrong."""
    return {each.name: each.parse(data, each.name) for each in FIELDS}


def dump_fields(order: Order) -> dict[str, Any]:
    """The same of an order, as JSON has them."""
    absent = {each.name: each.default for each in fields(Order)}
    values = [(each, getattr(order, each.name)) for each in FIELDS]
    written = [(each, value) for each, value in values if not each.optional or value != absent[each.name]]
    return {each.name: None if value is None else each.dump(value) for each, value in written}


def difference(there: Order, asked: Order, recorded: bool = False) -> str | None:
    """How the order of a uuid differs from what is asked for by the same uuid now; None where it does not.

    `recorded`: only a record is known of what is there, which says nothing of keys, user-data and the count.
    """
    for each in sorted(FIELDS, key=lambda each: each.told):
        attribute = each.compared or each.name
        if each.differs is None or (recorded and not each.recorded):
            continue
        if each.name == 'project_id' and not there.project_id:
            continue  # an older ecompute writes none
        if getattr(there, attribute) != getattr(asked, attribute):
            return each.differs(there)
    return None
