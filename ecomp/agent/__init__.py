"""ecompute's use cases: what it has, what it is asked for, and the difference carried out.

`instance` carries out one instance, `host` looks after the host, `queue` takes from the queues, `images` has the base
volumes; here is the loop that uses them.

The threads of an ecompute, by name: what each does, whose state that is and who else may touch it, and how it ends. Of
`--count` computes each has its own, but for main, known etcd and the two that follow.

    main                      starts, hears and buries the worker processes (Pool); others hand jobs in, under its lock.
                              A signal sets flags here and wakes it. Ends last, and waits for all that is joined
    planner                   lists, plans and begins tasks: Planner's state is its own, but for the agenda. Ends, and
                              for good, at a signal or where the compute becomes read-only
    build_N                   carries out a build; one instance is one thread's at a time, and its record with it. What
                              was done goes to the planner by a queue. Joined when what is in work has ended
    task_N                    the same for all other tasks
    minute                    asks placement of claims (ClaimKeeper) and the provider (Registration), which nobody else
                              touches while the compute runs; one at a time. Not waited for at the end
    presence                  keeps /computes/<compute> on its lease (Presence); others only read the lease. Joined
    follow /hosts/<compute>/  follows requests and queues, and tells: its calls set a flag or hand a state over, under
                              a lock. Joined
    follow /audit/            follows audits, and puts them into the queue of `audits`. Joined
    audits                    answers audits, by an etcd connection of its own (Answerer). Joined
    known etcd                writes <state>/etcd.json (KnownEtcd): others leave a value there for it. Joined
    queues                    with `queues: True`: takes from the queues (Puller, and its agenda). Joined
    start_N                   with --count: registers and starts computes, some at a time. Joined when all are begun
    end_N                     the same for their ends
    libvirt-events            libvirt's event loop, here and in each worker; its calls only nudge. Ends with the process
    libvirt-open              opens a connection to libvirtd, here and in each worker. Ends when libvirtd answers
    libvirt-reopen            opens it again when it is lost. Ends when the connection is closed
    agents                    asks guests' agents for addresses; who wants them reads the last answer. Ends at close
    to a worker               writes jobs into one worker's pipe, from a queue. Ends with that worker
    scrub                     reads base volumes (Scrubber). Joined
    libvirt-ask               in a worker: asks one guest to turn itself off. Ends when its QEMU has heard it
    download                  in a worker: fetches one image; the job reads how far it is. Ends with the download
    Thread-N                  not ours: gRPC's, one for each channel or stream, and watchdog's, which sees .ready files
"""
