"""Which URLs an image may be asked for at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.image import check_image

TAKEN = [
    'http://download.cirros-cloud.net/0.3.6/cirros-0.3.6-x86_64-disk.img',
    'https://cloud-images.ubuntu.com/bionic/current/bionic-server-cloudimg-amd64.img',
    'HTTP://host/x',
    'http://host',
    'http://host:8080/x?y=z#f',
    'http://user:secret@host/x',
    'http://[::1]:80/x',
    'http://127.0.0.1/x',
    'http://host/%20',
    'file:///var/images/x.qcow2',
]
REFUSED = [
    ('', 'must be a URL that starts with'),
    ('image.img', 'must be a URL that starts with'),
    ('/var/images/x', 'must be a URL that starts with'),
    ('-f', 'must be a URL that starts with'),
    ('ftp://host/x', 'must be a URL that starts with'),
    ('nbd://host/x', 'must be a URL that starts with'),
    ('json:{"file.filename":"/etc/shadow"}', 'must be a URL that starts with'),
    ('javascript:x', 'must be a URL that starts with'),
    ('file:x', 'must name an absolute path'),
    ('file://x', 'must name an absolute path'),
    ('file://host/x', 'must name an absolute path'),
    ('file:', 'must name an absolute path'),
    ('http:', 'names no host'),
    ('http://', 'names no host'),
    ('http:///x', 'names no host'),
    ('http://:80/x', 'names no host'),
    ('http://host:port/x', 'is not a URL'),
    ('http://host:99999/x', 'is not a URL'),
    ('http://[::1/x', 'is not a URL'),
    ('http://host/a b', 'space or a control character'),
    (' http://host/', 'space or a control character'),
    ('http://host/\n', 'space or a control character'),
    ('http://host/\r\nX: y', 'space or a control character'),
    ('http://host/\x00', 'space or a control character'),
    ('http://host/\x7f', 'space or a control character'),
    ('http://host/\udcff', 'is not a URL'),
    ('http://host/' + 'x' * 2048, 'more than 2048'),
]


@pytest.mark.parametrize('url', TAKEN)
def test_taken(url: str) -> None:
    assert check_image(url) == url


@pytest.mark.parametrize(('url', 'reason'), REFUSED)
def test_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_image(url)


@given(st.text(alphabet=st.characters(exclude_categories=())) | st.text().map('http://'.__add__))
def test_a_url_is_taken_or_refused_and_nothing_else(url: str) -> None:
    try:
        taken = check_image(url)
    except ValueError:
        return
    taken.encode()  # it is hashed for a file name
