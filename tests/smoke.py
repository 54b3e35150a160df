"""The mark `smoke`: of the tests that need root, those few that say most of another kernel or userland, by the promise that they hold.

The first of each promise is `brief` as well: for the machine that `scripts/test` boots beside everything else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

# A name stands for all of its parameters, unless one is given.
SMOKE = {
    "1: the lease answers and nothing else does": (
        "e2e/test_run.py::test_a_sealed_run_reaches_its_broker_and_nothing_else",
        "e2e/test_attack_kit.py::test_a_sealed_payload_reaches_nothing[here-root]",
        "e2e/test_attack_kit.py::test_plain_bwrap_reaches_what_the_seal_blocks[root]",
        "e2e/test_cases_pf.py::test_ipv6_link_local_does_not_lead_around_the_filter",
    ),
    "2: and that stays so": (
        "e2e/test_cases_pf.py::test_a_flushed_ruleset_opens_nothing_and_the_gate_comes_back",
        "e2e/test_cases_pf.py::test_a_host_that_forwards_forwards_nothing_of_a_run",
        "e2e/test_cases_pf.py::test_other_tables_are_left_as_they_are",
        "e2e/test_cases_pf.py::test_route_localnet_leads_to_no_loopback_service",
        "tests/kernel/test_contract.py::test_a_lease_that_nobody_renews_runs_out[real]",
        "e2e/test_cases_pf.py::test_what_others_change_opens_nothing_but_the_lease[everything]",
        "tests/kernel/test_contract.py::test_the_routes_of_a_seal_lead_where_they_must[real]",
        "tests/kernel/test_contract.py::test_what_somebody_did_to_a_seal_is_told_and_nothing_else[real-enslave-told5]",
        "tests/kernel/test_contract.py::test_what_somebody_did_to_a_seal_is_told_and_nothing_else[real-flip_forwarding-told8]",
        "tests/kernel/test_contract.py::test_what_somebody_did_to_a_seal_is_told_and_nothing_else[real-delete_gate-told14]",
        "tests/kernel/test_watch.py::test_a_change_wakes_those_whom_it_concerns_and_nobody_else[one-nft_flush_ruleset-]",
        "tests/kernel/test_watch.py::test_a_change_wakes_those_whom_it_concerns_and_nobody_else[one-sysctl_-w_net.ipv4.conf.LINK1.rp_filter=1-]",
        "tests/kernel/test_watch.py::test_a_change_wakes_those_whom_it_concerns_and_nobody_else[one-nsenter_nft_add_table_inet_sealnet-]",
        "tests/kernel/test_watch.py::test_a_change_wakes_those_whom_it_concerns_and_nobody_else[many-nsenter_nft_add_table_inet_sealnet-]",
    ),
    "3: a refusal is an answer": ("e2e/test_cases_pf.py::test_a_refused_connection_fails_at_once_with_an_errno[sealed]",),
    "4: the payload cannot change it": (
        "e2e/test_cases_door.py::test_no_capability_is_left[root]",
        "e2e/test_cases_door.py::test_no_socket_family_leads_around_the_filter[root]",
        "e2e/test_cases_door.py::test_the_kernels_files_are_closed[root]",
        "e2e/test_cases_door.py::test_no_descriptor_is_inherited[root]",
        "e2e/test_cases_door.py::test_nested_user_namespaces_are_refused[1234]",
        "e2e/test_cases_door.py::test_a_user_namespace_that_was_asked_for_owns_nothing_of_the_seal[1234]",
        "tests/kernel/test_seccomp.py::test_the_program_fits_the_kernel[x86_64-sealed]",
        "tests/kernel/test_seccomp.py::test_every_call_that_this_libseccomp_knows_was_decided_on",
        "tests/kernel/test_seccomp.py::test_the_kernel_makes_no_namespace",
        "tests/kernel/test_seccomp.py::test_what_is_left_out_does_not_exist",
        "tests/kernel/test_seccomp.py::test_nothing_is_typed_into_a_terminal",
    ),
    "5: the payload cannot pass for another run": ("e2e/test_cases_pf.py::test_a_run_cannot_pass_for_another",),
    "6: nothing is left, and connections die": (
        "e2e/test_cases_lif.py::test_a_background_child_does_not_keep_the_namespace[sealed]",
        "e2e/test_cases_pf.py::test_a_connection_does_not_outlive_its_run[reap]",
        "e2e/test_cases_proc.py::test_a_fork_storm_does_not_outrun_the_end[reap]",
        "tests/kernel/test_contract.py::test_every_process_of_a_run_is_ended_in_its_cgroup_and_in_its_namespace[real]",
        "tests/kernel/test_contract.py::test_everything_is_taken_away_and_taking_it_away_again_succeeds[real]",
    ),
    "7: reap needs the run id alone": (
        "e2e/test_cases_lif.py::test_the_supervisor_and_both_bwraps_killed_leave_nothing_that_reap_does_not_take",
        "e2e/test_cases_lif.py::test_reap_works_from_another_mount_namespace[there-here-killed]",
        "tests/kernel/test_contract.py::test_what_is_left_of_a_run_is_found_by_each_of_its_traces[real]",
        "tests/kernel/test_contract.py::test_a_strangers_netns_is_left_alone[real]",
    ),
    "8: the receipt says what was observed": (
        "tests/kernel/test_prove.py::test_a_sealed_run_is_proved_before_its_first_instruction",
        "e2e/test_receipt.py::test_each_confinement_has_its_receipt",
        "tests/kernel/test_prove.py::test_without_filter_and_gate_the_gateway_is_found_open",
        "tests/kernel/test_prove.py::test_check_is_made_beside_an_independent_implementation",
        "tests/kernel/test_prove.py::test_check_names_what_was_tampered_with[filter swapped]",
        "tests/kernel/test_prove.py::test_check_names_what_was_tampered_with[IPv6 back inside]",
    ),
    "statuses and signals": (
        "e2e/test_run.py::test_the_exit_status_is_the_payloads_own[command2-42]",
        "e2e/test_run.py::test_the_exit_status_is_the_payloads_own[command7-127]",
        "e2e/test_cases_proc.py::test_each_signal_reaches_the_command_once[1234]",
        "e2e/test_cases_proc.py::test_a_timeout_ends_the_command_with_124",
        "e2e/test_cases_proc.py::test_a_key_that_sends_a_signal_sends_it_once[1234]",
    ),
    "doors": (
        "e2e/test_doors.py::test_a_unix_broker_is_opened_with_the_rights_of_the_runs_user",
        "e2e/test_doors.py::test_a_broker_on_loopback_is_reached_through_a_relay",
        "e2e/test_doors.py::test_a_door_has_nothing_to_lose_and_strangers_are_turned_away",
        "e2e/test_doors.py::test_a_client_reaches_a_declared_host_through_the_proxy_and_no_other[curl-tls]",
    ),
    "this host": (
        "tests/kernel/test_survey.py::test_every_feature_works_here_and_trying_leaves_nothing",
        "tests/kernel/test_doctor.py::test_a_host_that_can_seal_is_told_and_nothing_is_left",
        "tests/kernel/test_routes.py::test_a_dump_is_what_pyroute2_makes_of_it",
        "tests/kernel/test_nft.py::test_an_element_is_found_by_its_whole_key_alone",
        "tests/kernel/test_nft.py::test_what_was_tried_is_counted_to_the_last_place_and_refused_beyond",
        "e2e/test_api.py::test_a_sealer_launches_lists_and_reaps",
    ),
}  # fmt: skip


_MARKED = {"smoke": {name for names in SMOKE.values() for name in names}, "brief": {names[0] for names in SMOKE.values()}}
# Marks its tests itself.
_MACHINE = "e2e/hosts/test_machine.py"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: one of the few that are run on every machine of scripts/vm")
    config.addinivalue_line("markers", "brief: of those, one of the fewer that scripts/test runs in a machine")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m smoke` or `-m brief` alone, files without such a test are not read: under emulation that takes minutes."""
    chosen = _MARKED.get(str(config.getoption("markexpr")))
    if chosen is None or not collection_path.name.startswith("test_"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return None if path == _MACHINE or path in {name.partition("::")[0] for name in chosen} else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, chosen in _MARKED.items():
            if item.nodeid in chosen or item.nodeid.partition("[")[0] in chosen:
                item.add_marker(mark)
