"""The compute agent, ecompute: makes its host match the requests for it.

`instance` carries out the tasks of one instance, `host` watches the host, `queue` takes queued requests, `images` has
the base volumes. The modules here are the loop that uses them.

Each thread, what it owns, and how it ends. Only one at a time handles an instance. Before it exits, ecompute waits for
the threads that are "joined" or "waited for".

    main                      tends the worker processes (Workers), under a lock. Signals wake it. Ends last
    planner                   reads requests, plans and starts tasks. Owns the Planner. Stops at a signal, and while
                              read-only. Waited for
    task                      owns an instance and its record while it carries out one task. Waited for
    confirm                   queries placement for a build's claim. Ends with the answer
    checks                    checks claims, the provider, this host (Upkeep, under a lock), user-data, and the key of
                              the host name, which it owns. Not waited for
    troubles                  checks what keeps the host from building (Troubles, under a lock). Not waited for
    presence                  keeps /computes/<compute>, and the keys beside it, on their lease (Presence). Joined
    follow /hosts/            follows requests, queues, presence keys and audits. Callbacks set a flag. Joined
    audits                    answers audits (Upkeep, under a lock). Waited for
    known etcd                writes <state>/etcd.json (KnownEtcd); other threads leave a value for it. Joined
    queues                    with `queues: True`: takes from the queues; owns the Taker and its deferrals. Waited for
    metrics                   with `metrics:` writes that file (MetricsWriter), from what others count. Not waited for
    libvirt-events            libvirt's event loop, here and in each worker; callbacks only wake. Ends with the process
    libvirt-open              opens a connection to libvirtd, here and in each worker. Ends when libvirtd answers
    libvirt-reopen            reopens a lost connection. Ends when the connection is closed
    to a worker               writes jobs from a queue into the pipe of one worker. Ends with that worker
    scrub                     verifies base volumes (Scrubber). Joined
    boot                      with --boot: gives a fake guest its address and its report. Not waited for
    libvirt-ask               asks a guest's agent, or QEMU, or in a worker a guest to shut down. Ends with the answer
    ending_N                  in a worker: stops guests. Joined when the pipe ends
    question                  in a worker: asks a server about a cached image. Ends with the answer, or after 10 s
    progress                  in the program that downloads an image: reports what it has. Ends with the program
    etcd                      connects to a member of etcd, for the first thread that needs it. Ends once connected
    Thread-N                  not ours: watchdog's, which watches for .ready files
"""
