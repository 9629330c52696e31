"""Mistakes that are made in the product's text, each of which a test must find.

The rows cover what the planted bugs of tests/model do not: the packages that the checker replaces or does not run.
They were chosen by reading the product, before their tests were looked for. The list is frozen: a test that is
removed or replaced must not leave a row unfound. A row without tests was found by none; see `note`.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One mistake: `old`, which occurs once in `file`, becomes `new`. One of `tests` fails."""

    description: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    note: str = ''


ROWS = (
    # Configuration, errors
    Row(
        'a default configuration that its group may write is accepted',
        'ecomp/yaml_file.py',
        'write_bits = 0o002 if status.st_gid == status.st_uid else 0o022',
        'write_bits = 0o002',
        ('tests/security/test_configuration.py::test_configuration_writable_by_others_is_refused',),
    ),
    Row(
        'plain text to a private address counts as staying on this machine',
        'ecomp/conf.py',
        ".removesuffix(']')).is_loopback",
        ".removesuffix(']')).is_private",
        ('tests/golden/test_texts.py::test_texts_are_read_as_before[files]',),
    ),
    Row(
        "a worker's error repeats its stage in the reason",
        'ecomp/errors.py',
        'return type(self), (self.stage, self.reason, self.is_host_fault)',
        'return type(self), (self.stage, str(self), self.is_host_fault)',
        ('tests/unit/test_build.py::test_errors_survive_pickling',),
    ),
    # Command line
    Row(
        'Enter confirms that selected instances are destroyed',
        'ecomp/cli/selection.py',
        "[y/N] ') != 'y':",
        "[y/N] ') == 'n':",
        ('tests/functional/test_apply.py::test_destroying_asks_on_a_terminal_and_needs_yes_without',),
    ),
    Row(
        'ssh-config names a guest as its own host',
        'ecomp/cli/enter.py',
        'if owner_by_name.get(access.display_name) == instance and not is_host else instance',
        'if owner_by_name.get(access.display_name) == instance else instance',
        ('tests/functional/test_enter.py::test_ssh_config_does_not_use_a_guest_name_that_is_a_host_name',),
    ),
    Row(
        'a member of a stack without a policy removes the policy that another member gives',
        'ecomp/cli/stack_file.py',
        'self._groups[group.name] = Membership(group.name, policy, strict)',
        'self._groups[group.name] = group',
        ('tests/unit/test_stack.py::test_members_with_aliases_flavors_and_image_names',),
    ),
    # Decisions
    Row(
        'a request is measured without the escapes of its record',
        'ecomp/model/order.py',
        r"len(value) + 5 * value.count(b'\x7f')",
        'len(value)',
        ('tests/security/test_values.py::test_record_of_the_largest_request_can_be_read',),
    ),
    Row(
        'a failed cloud-init of an earlier boot stays in the record',
        'ecomp/model/record.py',
        'last_boot=boot, cloud_init=None)',
        'last_boot=boot)',
        ('tests/unit/test_record.py::test_cloud_init_failure_belongs_to_its_boot',),
    ),
    Row(
        'a quota counts an evacuated instance beside its replacement',
        'ecomp/model/quota.py',
        'demand.is_tombstone and demand.replaced_by:',
        'demand.is_tombstone and demand.replaces:',
        ('tests/functional/test_audit.py::test_fix_counts_an_evacuated_instance_once',),
    ),
    Row(
        'a restored stack has the oldest instance of each entry',
        'ecomp/model/stack.py',
        'in sorted(places.items()):',
        'in sorted(places.items(), reverse=True):',
        ('tests/unit/test_stack.py::test_restored_stack_has_the_epoch_of_most_requests_and_the_newest_instances',),
    ),
    Row(
        'a value that was dropped as too large is not processed once it fits',
        'ecomp/model/queue.py',
        'return stored.revision, len(stored.value)',
        'return stored.revision, 0',
        ('tests/unit/test_queue.py::test_value_that_was_dropped_as_too_large_is_queued_once_it_fits',),
    ),
    Row(
        'the audit misses claims on computes whose claims it did not read',
        'ecomp/model/audit.py',
        'elif compute in world.visible_providers and compute not in held:',
        'elif compute not in held:',
        ('tests/unit/test_audit.py::test_consistent_cluster_has_no_finding',),
    ),
    Row(
        'the doctor does not report a clock that is behind',
        'ecomp/model/health.py',
        'and abs(facts.ahead_seconds) > MAX_CLOCK_DIFFERENCE_SECONDS',
        'and facts.ahead_seconds > MAX_CLOCK_DIFFERENCE_SECONDS',
        ('tests/unit/test_health.py::test_each_fault_is_found_with_its_cure',),
    ),
    Row(
        'an amount that fills a provider exactly counts as too large',
        'ecomp/model/explain.py',
        'if inventory.used + amount > inventory.capacity:',
        'if inventory.used + amount >= inventory.capacity:',
        ('tests/golden/test_texts.py::test_texts_are_read_as_before[requests]',),
    ),
    # placement
    Row(
        "a proxy's page confirms a write to placement",
        'ecomp/placement/client.py',
        "if answer.status_code == 200 and b'generation' not in answer.content:",
        "if answer.status_code == 200 and b'{' not in answer.content:",
        ('tests/functional/test_placement_tls.py::test_claim_is_not_confirmed_by_another_server',),
    ),
    Row(
        'an inventory with a superfluous class counts as right',
        'ecomp/placement/providers.py',
        'if inventories.keys() != expected.keys():',
        'if not inventories.keys() >= expected.keys():',
        ('tests/functional/test_placement.py::test_set_inventory_replaces_the_whole_inventory',),
    ),
    # etcd
    Row(
        'answers of etcd are not acknowledged, so that it stops sending',
        'ecomp/store/http2_client.py',
        'self._http.acknowledge_received_data(event.flow_controlled_length, self._stream_id)',
        'pass',
        ('tests/security/test_records.py::test_snapshot_reads_large_values_in_small_pages',),
    ),
    Row(
        'negative numbers of etcd are read as huge ones',
        'ecomp/store/messages.py',
        'lambda value: value if value < _SIGN_BIT else value - 2 * _SIGN_BIT',
        'lambda value: value',
        ('tests/unit/test_store.py::test_answers_of_etcd3_are_parsed_equally',),
    ),
    Row(
        'a follower does not give back the room of deleted keys',
        'ecomp/store/watch.py',
        'self._size -= len(entry.key) + _estimate_bytes(entry.value)',
        'self._size -= _estimate_bytes(entry.value)',
        ('tests/security/test_records.py::test_cache_counts_the_bytes_it_keeps',),
    ),
    Row(
        'a copy of a compute keeps the signs of life of the original fresh',
        'ecomp/shared/presence.py',
        'if self._life_leases and not self._is_lost:',
        'if self._life_leases:',
        ('tests/functional/test_presence.py::test_process_that_lost_its_presence_does_not_seem_alive',),
    ),
    Row(
        'the history splits a revision that arrives in two parts',
        'ecomp/store/history.py',
        'self._partial_events = revisions.pop() if reply.fragment else []',
        'self._partial_events = []',
        ('tests/functional/test_history.py::test_changes_longer_than_an_answer_are_read_in_whole_revisions',),
    ),
    Row(
        'roles stay enabled on an etcd that ignores certificates',
        'ecomp/store/roles.py',
        "            self._change('AuthDisable', token=token)\n",
        '',
        ('tests/functional/test_roles.py::test_etcd_without_client_certificates_is_refused',),
    ),
    # libvirt
    Row(
        'a guest may claim the address of another one by ARP',
        'ecomp/virt/xml.py',
        " arpsrcmacaddr='$MAC' arpsrcipaddr='$IP'/>",
        " arpsrcmacaddr='$MAC'/>",
        ('tests/functional/test_filters.py::test_guest_with_reserved_address_can_use_no_other',),
    ),
    Row(
        'a reopened connection to libvirt reports no changes',
        'ecomp/virt/connection.py',
        '            if self._notify is not None:\n                self._register_callbacks(connection)\n',
        '',
        ('tests/functional/test_libvirt.py::test_driver_reconnects_after_libvirtd_was_killed',),
    ),
    Row(
        'a domain of another compute is treated as ours',
        'ecomp/virt/domains.py',
        'if compute != own_compute:',
        'if not compute:',
        ('tests/functional/test_hypervisor.py::test_guest_is_created_started_and_destroyed',),
    ),
    Row(
        'a guest with several addresses by ARP gets one of them',
        'ecomp/virt/networks.py',
        'for mac, addresses in addresses_of.items() if len(addresses) == 1}',
        'for mac, addresses in addresses_of.items()}',
        ('tests/functional/test_ip.py::test_only_reliable_neighbours_are_returned',),
    ),
    Row(
        'a file system of disks that is not mounted seems to have no disks',
        'ecomp/virt/volumes.py',
        '            # Not an empty set: the instances would seem to be removed.\n',
        '            return set()\n',
        ('tests/functional/test_volumes.py::test_missing_image_directory_is_not_taken_for_empty',),
    ),
    # ecompute
    Row(
        'a guest that ignores the power button is asked for ever',
        'ecomp/agent/instance/instances.py',
        'self.request_times.get(instance, (now,))[0], now',
        'now, now',
        ('tests/unit/test_plan.py::test_shutdown_is_requested_again_until_the_grace_period_ends',),
    ),
    Row(
        'a restart forgets that a build had failed',
        'ecomp/agent/host/state.py',
        'self._entries[path.stem] = MemoryEntry(request, record, failed)',
        'self._entries[path.stem] = MemoryEntry(request, record)',
        ('tests/functional/test_ends_in_error.py::test_failure_keeps_its_reason_after_the_claim_is_released',),
    ),
    Row(
        'a build that was cancelled while it waited for a worker is carried out',
        'ecomp/agent/instance/pool.py',
        '                    self._waiting.remove(ticket)\n                    ticket.events',
        '                    ticket.events',
        ('tests/functional/test_pool.py::test_queued_build_is_cancelled_immediately',),
    ),
    Row(
        'an image that changed during its download is kept',
        'ecomp/agent/images/fetch.py',
        'if expected is None and not self._recheck(result.version):',
        'if False:',
        ('tests/functional/test_image_cache.py::test_image_that_changes_during_the_download_is_refused',),
    ),
    Row(
        'the inspection of an image may take any amount of memory',
        'ecomp/agent/images/inspection.py',
        '    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))\n',
        '',
        ('tests/security/test_images.py::test_image_inspection_has_a_memory_limit',),
    ),
    Row(
        'the use of a cached image does not protect it from eviction',
        'ecomp/agent/images/cache.py',
        '        os.utime(descriptor)\n',
        '',
        ('tests/functional/test_image_cache.py::test_least_recently_used_image_is_evicted',),
    ),
    # eschedule
    Row(
        'a host name of two computes means one of them',
        'ecomp/scheduler/queries/computes.py',
        '    if len(matches) > 1:\n        raise Conflict(',
        '    if len(matches) > 2:\n        raise Conflict(',
        ('tests/scenario/test_hosts.py::test_computes_with_one_host_name_need_their_uuids',),
    ),
    Row(
        'a host that restarts ends the waits for its instances',
        'ecomp/scheduler/changes/wait.py',
        'if host is not None and checked_at > began_at:',
        'if host is not None and checked_at >= began_at:',
        ('tests/functional/test_silent_hosts.py::test_host_is_silent_after_two_checks_in_a_row',),
    ),
    Row(
        'setting one limit of a quota removes the others',
        'ecomp/scheduler/operations/sharing.py',
        'limits = {**(current.limits if current else {}), **new_limits}',
        'limits = dict(new_limits)',
        ('tests/functional/test_sharing.py::test_setting_a_limit_keeps_the_other_limits',),
    ),
    Row(
        'a set of a group that lost a race tries no other compute',
        'ecomp/scheduler/placing/session.py',
        'given_up = {each for lot in lots if lot.is_short(claims) for each in _list_united(lot, groups)}',
        'given_up = set()',
        ('tests/unit/test_placing.py::test_group_of_one_compute_that_lost_a_race_moves_as_a_whole',),
    ),
    # Found by none, when they were first made
    Row(
        'an apply over the quota claims before it looks',
        'ecomp/scheduler/placing/session.py',
        '            check({**claims, **assignment.candidates})\n',
        '',
        ('tests/functional/test_apply.py::test_apply_over_a_quota_names_the_quota_and_claims_nothing',),
    ),
    Row(
        'removed members stay in their group while a stack is planned',
        'ecomp/scheduler/placing/stack.py',
        'settled.without_members(*self.change.removed_instances, *self.order.instances)',
        'settled.without_members(*self.order.instances)',
        ('tests/functional/test_apply.py::test_replaced_members_leave_a_strict_group_that_fills_all_hosts',),
    ),
    Row(
        "after a lost answer another apply's new stack key is taken for ours",
        'ecomp/store/client.py',
        '(entry.revision, entry.value, entry.lease) == (revision, put.value.encode(), put.lease)',
        'entry.revision == revision',
        ('tests/functional/test_scheduler_lost.py::test_key_of_a_new_stack_is_read_back_after_a_lost_message',),
    ),
    Row(
        'a delivery without an answer, of what has ended since, counts as not delivered',
        'ecomp/shared/ends.py',
        'return record.revision if record is not None else None',
        'return None',
        ('tests/functional/test_scheduler_lost.py::test_lost_delivery_of_what_has_ended_since_is_reported_as_done',),
    ),
    Row(
        'the life lease is not renewed at a start',
        'ecomp/shared/presence.py',
        'exist = bool(ages) and None not in ages and self._store.keep_alive(known_leases[0]) > 0',
        'exist = bool(ages) and None not in ages',
        ('tests/functional/test_presence.py::test_first_life_lease_is_renewed_and_the_anchor_is_not',),
    ),
    Row(
        'any final record removes a guest on a host that returns',
        'ecomp/agent/instance/instances.py',
        'if record is not None and (record.state, record.fault) == (GONE, UNSEEN_END_FAULT):',
        'if record is not None and record.state in (GONE, ERROR):',
        (
            'tests/functional/test_planner.py::'
            'test_guest_without_a_request_is_removed_only_if_its_end_was_accepted_unseen',
        ),
    ),
    Row(
        'an evacuation announces without a look at older attempts',
        'ecomp/scheduler/placing/session.py',
        'takes_over, check = self.resume or require_ended is not None, require_ended',
        'takes_over, check = False, require_ended',
        ('tests/model/test_evacuations.py::test_evacuation_waits_for_an_older_attempt_with_its_uuid',),
    ),
    Row(
        'an evacuation takes over one that is in flight',
        'ecomp/scheduler/placing/evacuate.py',
        'self.session.announce(None, partial(require_ended, other, owner, outcome=outcome))',
        'self.session.announce(None, lambda _: None)',
        ('tests/scenario/test_evacuate.py::test_evacuation_needs_a_silent_host_and_is_alone',),
    ),
    Row(
        'an evacuation keeps a uuid that is claimed on another silent host',
        'ecomp/scheduler/placing/evacuate.py',
        'if claimed_on not in self.session.read_alive():',
        'if False:',
        ('tests/scenario/test_evacuate.py::test_guest_stays_while_its_replacement_is_claimed_on_a_silent_host',),
    ),
    Row(
        'an evacuation keeps a uuid that is claimed on the evacuated host',
        'ecomp/scheduler/placing/evacuate.py',
        'if not claimed_on and not is_listed:',
        'if not is_listed:',
        ('tests/model/test_evacuations.py::test_replacement_claimed_on_the_evacuated_host_gets_another_uuid',),
    ),
    Row(
        'an evacuation releases claims on a host that is back',
        'ecomp/scheduler/placing/evacuate.py',
        'return holding if is_alive(store, compute) else find_needed(store, holding, compute)',
        'return find_needed(store, holding, compute)',
        ('tests/model/test_evacuations.py::test_evacuation_keeps_the_claims_of_a_host_that_is_back',),
    ),
    Row(
        'an evacuation releases claims without a look for their owners',
        'ecomp/scheduler/placing/evacuate.py',
        'else find_needed(store, holding, compute)',
        'else ()',
        ('tests/model/test_evacuations.py::test_evacuation_releases_only_claims_without_an_owner',),
    ),
    Row(
        'an evacuation places a changed request by its old query',
        'ecomp/scheduler/placing/evacuate.py',
        'if (request.query, request.group, request.stack) != (planned.query, planned.group, planned.stack):',
        'if False:',
        ('tests/model/test_evacuations.py::test_guest_whose_request_was_changed_after_the_plan_stays',),
    ),
    Row(
        'an evacuation overwrites a newer instance of a stack',
        'ecomp/scheduler/queries/stacks.py',
        'stack.epoch != place.epoch or is_late:',
        'stack.epoch != place.epoch:',
        ('tests/model/test_evacuations.py::test_evacuation_leaves_an_entry_with_a_newer_instance',),
    ),
    Row(
        "an end of any instance ends its stack's entry",
        'ecomp/scheduler/queries/stacks.py',
        '(stack.epoch, entry[::2]) == (place.epoch, (place.incarnation, False))',
        '(stack.epoch, entry.is_ended) == (place.epoch, False)',
        ('tests/model/test_evacuations.py::test_removed_record_of_a_replaced_instance_does_not_end_its_entry',),
    ),
    Row(
        "a compute does not read others' acceptance of an etcd",
        'ecomp/agent/process.py',
        '(keys.ACCEPTED, compute.queues.on_accepted), ',
        '',
        ('tests/faults/test_restored.py::test_acceptance_by_one_compute_counts_for_one_that_was_off',),
    ),
    Row(
        'a move out of a queue does not compare the queue entry',
        'ecomp/agent/queue.py',
        '[Unchanged(waiting.key, place.revision), Unchanged(',
        '[Unchanged(',
        ('tests/functional/test_queues.py::test_request_that_was_removed_manually_is_not_moved',),
    ),
    Row(
        'an attempt uses an offer of any age',
        'ecomp/scheduler/placing/create.py',
        'if announced - offer.queried_at > MAX_OFFER_AGE_SECONDS:',
        'if False:',
        ('tests/functional/test_claims.py::test_attempt_with_an_old_offer_queries_placement_again',),
    ),
    # The lab, the metadata server
    Row(
        'a lab is removed together with what is mounted deep in it',
        'ecomp/lab/state.py',
        'if top in mount_point.parents:',
        'if top == mount_point.parent:',
        ('tests/functional/test_lab_hosts.py::test_down_unmounts_a_file_system_in_use_and_keeps_its_files',),
    ),
    Row(
        'an address that two machines use gets the metadata of its lease',
        'md_server/mdserver/files.py',
        'if macs == {owner.mac} or not (macs or owner.reserved):',
        'if owner.mac in macs or not (macs or owner.reserved):',
        ('tests/unit/test_mdserver.py::test_address_used_by_another_machine_is_forged',),
    ),
)
