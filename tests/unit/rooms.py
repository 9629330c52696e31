"""Layers of the product: what each may import, and where libraries and risky calls go.

The direction of imports: front doors → what they start; agent → placement, shared, virt, model; cli → scheduler,
placement, shared, model; scheduler → placement, shared, model; shared → store; boundaries → model; all → errors and
configuration values.
No module imports a front door.
"""

from __future__ import annotations

# ecomp.log is included because a worker is a separate process, and each process sets up its logging.
AGENT_IMPORTS = {
    *('ecomp', 'ecomp.addresses', 'ecomp.yaml_file', 'ecomp.errors'),
    *('ecomp.backends', 'ecomp.failpoints', 'ecomp.systemd', 'ecomp.tls', 'ecomp.version'),
    *('ecomp.files', 'ecomp.conf', 'ecomp.compute_conf', 'ecomp.log', 'ecomp.model', 'ecomp.placement'),
    *('ecomp.metrics', 'ecomp.shared', 'ecomp.store', 'ecomp.virt'),
}
SCHEDULER_IMPORTS = {
    *('ecomp.errors', 'ecomp.failpoints', 'ecomp.conf', 'ecomp.metrics', 'ecomp.model', 'ecomp.placement'),
    *('ecomp.shared', 'ecomp.store'),
}

# {layer: modules of ours that it may import beside itself}. The longest matching prefix of a module is its layer.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    'ecomp': set(),
    'ecomp.errors': set(),
    'ecomp.arguments': {'ecomp.errors'},
    'ecomp.log': {'ecomp.model'},
    'ecomp.failpoints': {'ecomp.errors'},
    'ecomp.yaml_plain': set(),
    'ecomp.yaml_graph': {'ecomp.errors', 'ecomp.model', 'ecomp.yaml_plain'},
    'ecomp.yaml_file': {'ecomp.errors', 'ecomp.model', 'ecomp.yaml_graph', 'ecomp.yaml_plain'},
    'ecomp.files': {'ecomp.errors'},
    'ecomp.metrics': {'ecomp.errors', 'ecomp.model'},
    'ecomp.systemd': set(),
    'ecomp.tls': set(),
    'ecomp.version': {'ecomp'},
    'ecomp.addresses': {'ecomp.model'},
    'ecomp.conf': {'ecomp.yaml_file', 'ecomp.model'},
    'ecomp.compute_conf': {'ecomp.conf', 'ecomp.errors', 'ecomp.yaml_file', 'ecomp.model'},
    'ecomp.model': {'ecomp.errors'},
    'ecomp.backends': {*('ecomp.errors', 'ecomp.conf', 'ecomp.model', 'ecomp.placement', 'ecomp.store', 'ecomp.tls')},
    'ecomp.placement': {'ecomp.errors', 'ecomp.conf', 'ecomp.metrics', 'ecomp.model', 'ecomp.tls'},
    'ecomp.shared': {'ecomp.errors', 'ecomp.model', 'ecomp.store'},
    'ecomp.store': {'ecomp.errors', 'ecomp.conf', 'ecomp.metrics', 'ecomp.model', 'ecomp.tls'},
    'ecomp.virt': {
        *('ecomp.addresses', 'ecomp.errors', 'ecomp.failpoints', 'ecomp.files', 'ecomp.conf', 'ecomp.metrics'),
        'ecomp.model',
    },
    'ecomp.agent.jobs': {'ecomp.errors', 'ecomp.model'},
    'ecomp.agent.images': {*AGENT_IMPORTS, 'ecomp.files', 'ecomp.agent.jobs'},
    'ecomp.agent.host': {*AGENT_IMPORTS, 'ecomp.files', 'ecomp.agent.jobs', 'ecomp.agent.images'},
    'ecomp.agent.instance': {
        *(*AGENT_IMPORTS, 'ecomp.files', 'ecomp.agent.jobs', 'ecomp.agent.images', 'ecomp.agent.host')
    },
    'ecomp.agent.queue': {*(*AGENT_IMPORTS, 'ecomp.agent.instance', 'ecomp.agent.jobs')},
    'ecomp.agent': {
        *(*AGENT_IMPORTS, 'ecomp.files', 'ecomp.agent.images', 'ecomp.agent.jobs', 'ecomp.agent.host'),
        *('ecomp.agent.instance', 'ecomp.agent.queue'),
    },
    'ecomp.scheduler.queries': SCHEDULER_IMPORTS,
    'ecomp.scheduler.changes': {*SCHEDULER_IMPORTS, 'ecomp.scheduler.queries'},
    'ecomp.scheduler.operations': {*SCHEDULER_IMPORTS, 'ecomp.scheduler.queries', 'ecomp.scheduler.changes'},
    # A replacement is delivered together with the tombstone of its predecessor.
    'ecomp.scheduler.placing': {
        *SCHEDULER_IMPORTS,
        *('ecomp.scheduler.queries', 'ecomp.scheduler.changes', 'ecomp.scheduler.operations'),
    },
    'ecomp.scheduler': set(),
    'ecomp.lab': {
        *('ecomp', 'ecomp.arguments', 'ecomp.errors', 'ecomp.files', 'ecomp.conf', 'ecomp.compute_conf', 'ecomp.log'),
        *('ecomp.model', 'ecomp.placement', 'ecomp.store', 'ecomp.systemd', 'ecomp.version'),
    },
    'ecomp.compute': {
        *('ecomp', 'ecomp.arguments', 'ecomp.yaml_file', 'ecomp.conf', 'ecomp.errors', 'ecomp.failpoints'),
        *('ecomp.compute_conf', 'ecomp.log', 'ecomp.systemd', 'ecomp.model', 'ecomp.placement', 'ecomp.store'),
        *('ecomp.version', 'ecomp.virt', 'ecomp.agent'),
    },
    'ecomp.cli': {
        *('ecomp.backends', 'ecomp.errors', 'ecomp.conf', 'ecomp.files', 'ecomp.version', 'ecomp.yaml_file'),
        *('ecomp.yaml_graph', 'ecomp.metrics', 'ecomp.model', 'ecomp.placement', 'ecomp.shared', 'ecomp.store'),
        *('ecomp.scheduler.queries', 'ecomp.scheduler.changes', 'ecomp.scheduler.operations'),
        *('ecomp.scheduler.placing', 'ecomp.ui'),
    },
    'ecomp.ui': {'ecomp.conf', 'ecomp.errors', 'ecomp.model', 'ecomp.scheduler.queries', 'ecomp.store'},
    'ecomp.schedule': {
        *('ecomp.yaml_file', 'ecomp.errors', 'ecomp.conf', 'ecomp.log', 'ecomp.model', 'ecomp.cli', 'ecomp.version')
    },
    'mdserver': set(),
}
FRONT_DOORS = {
    *('ecomp.compute', 'ecomp.schedule', 'ecomp.lab.elab', 'ecomp.lab.placement_server'),
    *('mdserver.server', 'mdserver.seed'),
}

# {module: where it may be imported}, for third-party libraries and the parts of Python that act on the machine.
LIBRARY_PLACES: dict[str, set[str]] = {
    'argparse': {'ecomp.arguments', 'ecomp.compute', 'ecomp.lab.elab', 'mdserver'},
    'h2': {'ecomp.store.http2_client'},
    **{library: set() for library in ('etcd3', 'google', 'grpc')},  # google: protobuf
    'libvirt': {'ecomp.virt'},
    'libvirtaio': set(),
    'oslo_utils': {'ecomp.virt'},
    'pycdlib': {'ecomp.virt.volumes'},
    'watchdog': {'ecomp.files'},
    **{library: {'ecomp.agent.images.remote'} for library in ('certifi', 'requests', 'urllib3')},
    'psutil': {'ecomp.agent.host.provider'},
    'prometheus_client': {'ecomp.metrics'},
    'os_traits': {'ecomp.model.traits'},
    'yaml': {'ecomp.yaml_graph'},
    'bottle': {'mdserver'},
    'waitress': {'mdserver', 'ecomp.lab', 'ecomp.ui.server'},  # the lab serves placement with it
    'placement': {'ecomp.lab'},
    'jsonschema': {'ecomp.lab'},  # the library that placement validates with
    'cryptography': {'ecomp.lab.certs'},
    # The agent starts mdserver, and child processes for images; the lab starts the cluster's daemons.
    'subprocess': {
        *('ecomp.lab', 'ecomp.agent.host.metadata', 'ecomp.agent.images.child'),
        'ecomp.cli.enter',  # ssh to a host
        'ecomp.version',  # git rev-parse
        *('ecomp.virt.networks', 'ecomp.virt.libvirt_host'),  # ip, ebtables, and test(1) as QEMU's user
    },
}

# Pure modules: time, uuids and randomness are arguments, and they do no I/O.
PURE_MODULES = {
    *('ecomp.model', 'ecomp.store.messages', 'ecomp.virt.xml'),
    *('ecomp.agent.instance.plan', 'ecomp.yaml_plain'),
    *('ecomp.cli.options', 'ecomp.cli.suggestions', 'ecomp.cli.tables'),
    *('ecomp.lab.network', 'ecomp.ui.picture'),
    *('mdserver.guests', 'mdserver.metadata'),
}
IMPURE_IMPORTS = {
    *('glob', 'http', 'logging', 'multiprocessing', 'os', 'pathlib', 'secrets', 'shutil', 'signal', 'socket'),
    *('sys', 'tempfile', 'threading', 'time'),
}
IMPURE_CALLS = {'open', 'input', 'datetime.now', 'datetime.utcnow', 'datetime.today', 'date.today', 'uuid.uuid4'}
# Modules that may read the wall clock in seconds, with the reason. Timers use time.monotonic.
WALL_CLOCK_MODULES = {
    'mdserver.server': 'dnsmasq says in seconds since 1970 when a DHCP lease ends',
    'ecomp.agent.images.cache': 'when a base volume was last read is a time of modification, and outlives a boot',
}

# Modules that may exit the process although they are not a front door, with the reason.
EXIT_MODULES = {
    'ecomp.agent.images.child': 'a child whose parent is gone has nobody to raise to',
    'ecomp.agent.images.inspection': 'the exit code tells the parent that qemu-img is missing',
}
# Modules that may replace the process by exec, with the reason.
EXEC_MODULES = {
    'ecomp.cli.enter': 'who is in a guest by ssh has a terminal, and ssh alone knows what to do with it',
    'ecomp.agent.images.inspection': 'qemu-img inherits its limits, its parent and what ends it',
}

EXIT_CALLS = {'print', 'exit', 'quit', 'sys.exit', 'os._exit', 'SystemExit'}
SHELL_CALLS = {'os.system', 'os.popen', 'os.spawnl', 'os.spawnv', 'os.execv', 'os.execvp', 'os.fork'}
HIDDEN_IMPORTS = {'__import__', 'import_module', 'importlib.import_module', 'exec', 'eval'}
