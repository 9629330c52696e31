"""Print a guest's NoCloud seed: `python -m mdserver.seed --guests DIR MAC [CONF]`.

The output is a JSON object {file name: text}, with bytes that are not UTF-8 (gzip) as halves of surrogate pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from mdserver import conf, guests, metadata
from mdserver.files import Files


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(prog='mdserver.seed', description="A guest's NoCloud seed, as JSON.")
    cli.add_argument('mac', help='MAC address of one interface of the guest')
    cli.add_argument('conf', nargs='?', type=Path, help='mdserver.conf. Default: built-in values')
    guests_help = "directory of ecompute's metadata files. Default: `guests` of mdserver.conf"
    cli.add_argument('--guests', metavar='DIR', type=Path, help=guests_help)
    cli.add_argument('--no-phone-home', action='store_true', help='omit the script that reports to the metadata server')
    arguments = cli.parse_args(argv)
    try:
        config = conf.load(arguments.conf)
        if arguments.guests is not None:
            config = replace(config, guests=arguments.guests)
        guest_files = Files(config)
        guest = guest_files.fill_in_defaults(guest_files.read_guest(arguments.mac))
    except (conf.ConfError, guests.UnknownGuestError, guests.BrokenFileError, ValueError) as error:
        print(f'mdserver: {error}', file=sys.stderr)
        return 2 if isinstance(error, conf.ConfError) else 1
    seed_files = metadata.make_seed(guest, with_phone_home=not arguments.no_phone_home)
    print(json.dumps({name: body.decode('utf-8', 'surrogateescape') for name, body in seed_files.items()}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
