"""The payload's environment: what passes, what never does, and what sealnet adds."""

from __future__ import annotations

import itertools
import re

import pytest

from sealnet.errors import UsageError
from sealnet.model import environment as env

WHO = {"user": "ann", "home": "/home/ann", "shell": "/bin/sh"}
OWN = {"USER": "ann", "LOGNAME": "ann", "HOME": "/home/ann", "SHELL": "/bin/sh"}

PROXIES = (
    "http_proxy", "HTTP_PROXY", "https_proxy", "Https_Proxy", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY", "ftp_proxy",
    "CGI_HTTP_PROXY", "npm_config_proxy", "npm_config_https_proxy", "NPM_CONFIG_NOPROXY", "NODE_USE_ENV_PROXY", "GOPROXY",
)  # fmt: skip


def test_of_the_callers_variables_only_a_short_list_passes() -> None:
    inherited = {"PATH": "/opt/bin", "LANG": "C.UTF-8", "LC_ALL": "C", "TERM": "xterm", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "/x"}

    made = env.environment(inherited, **WHO)

    assert made == {"PATH": "/opt/bin", "LANG": "C.UTF-8", "LC_ALL": "C", "TERM": "xterm"} | OWN


def test_a_caller_without_a_path_gives_the_usual_one() -> None:
    assert env.environment({}, **WHO)["PATH"] == env.DEFAULT_PATH


def test_the_user_is_the_payloads_and_not_the_callers() -> None:
    inherited = {"USER": "root", "LOGNAME": "root", "HOME": "/root", "SHELL": "/bin/bash"}

    assert OWN.items() <= env.environment(inherited, passed=("*",), **WHO).items()


def test_a_glob_passes_more_and_its_case_counts() -> None:
    inherited = {"CI": "1", "GITHUB_SHA": "abc", "github_sha": "def", "OTHER": "x"}

    made = env.environment(inherited, passed=("CI", "GITHUB_*"), **WHO)

    assert {"CI": "1", "GITHUB_SHA": "abc"}.items() <= made.items()
    assert not {"github_sha", "OTHER"} & made.keys()


@pytest.mark.parametrize("name", PROXIES)
def test_an_inherited_proxy_variable_never_passes(name: str) -> None:
    made = env.environment({name: "http://proxy:3128", "CONTROL": "1"}, passed=("*", name), **WHO)

    assert name not in made
    assert made["CONTROL"] == "1"


def test_no_spelling_of_proxy_passes() -> None:
    inherited = {f"A_{''.join(letters)}_B": "x" for letters in itertools.product("pP", "rR", "oO", "xX", "yY")}

    assert env.environment(inherited, passed=("*",), **WHO).keys() == OWN.keys() | {"PATH"}


def test_a_given_variable_passes_as_it_is_and_wins() -> None:
    given_ = [("PATH", "/x"), ("HOME", "/tmp"), ("http_proxy", "http://broker.sealnet:1"), ("EMPTY", "")]

    made = env.environment({"PATH": "/y"}, given=given_, **WHO)

    assert dict(given_).items() <= made.items()


@pytest.mark.parametrize("name", ["BASH_FUNC_x%%", "1ST", "A-B", "A B", "", "É"])
def test_a_variable_that_no_shell_could_have_set_does_not_pass(name: str) -> None:
    assert name not in env.environment({name: "x"}, passed=("*",), **WHO)


def test_the_environment_is_sorted_so_that_equal_requests_make_equal_plans() -> None:
    one = env.environment({"LC_B": "1", "LC_A": "2"}, given=[("Z", "1"), ("A", "2")], **WHO)
    other = env.environment({"LC_A": "2", "LC_B": "1"}, given=[("A", "2"), ("Z", "1")], **WHO)

    assert list(one) == sorted(one)
    assert list(one.items()) == list(other.items())


# --setenv and the other options that name a variable


@pytest.mark.parametrize(("text", "pair"), [("A=1", ("A", "1")), ("A=", ("A", "")), ("a_B9=x=y", ("a_B9", "x=y")), ("_=é\n", ("_", "é\n"))])
def test_an_assignment_is_split_at_its_first_equals_sign(text: str, pair: tuple[str, str]) -> None:
    assert env.assignment(text) == pair


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A", "cannot use --setenv 'A': it must be NAME=VALUE"),
        ("", "it must be NAME=VALUE"),
        ("=1", "cannot use --setenv '=1': it has no name before the '='"),
        ("1A=1", "does not begin with a digit"),
        ("A-B=1", "a variable name is letters"),
        ("É=1", "a variable name is letters"),
        ("A\n=1", "a variable name is letters"),
        ("A=x\0--bind\0/\0/", "its value has a NUL byte"),
    ],
)
def test_what_is_no_assignment_is_a_usage_error(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        env.assignment(text)


def test_whoever_forgets_the_value_is_told_how_to_pass_the_callers_own() -> None:
    with pytest.raises(UsageError) as caught:
        env.assignment("TOKEN")

    assert caught.value.hint == "to hand on the caller's own value: --pass-env TOKEN"


# What the loader obeys


def test_the_callers_working_directory_is_not_the_payloads() -> None:
    inherited = {"PWD": "/home/ann", "OLDPWD": "/home"}
    user = {"user": "ann", "home": "/home/ann", "shell": "/bin/sh"}

    passed = env.environment(inherited, passed=("*",), **user)
    given = env.environment(inherited, given=[("PWD", "/srv")], **user)

    assert (passed.get("PWD"), passed["OLDPWD"]) == (None, "/home")
    assert given["PWD"] == "/srv"


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "MALLOC_TRACE", "GCONV_PATH", "GLIBC_TUNABLES", "TMPDIR", "LANGUAGE", "LC_ALL"]
)
def test_a_variable_that_the_loader_obeys_is_known(name: str) -> None:
    assert env.is_loader(name)


@pytest.mark.parametrize("name", ["PATH", "OLD_PRELOAD", "ld_preload", "LDFLAGS", "HOME", "LCX"])
def test_any_other_is_not_taken_for_one(name: str) -> None:
    assert not env.is_loader(name)


# What sealnet tells


def test_a_sealed_payload_is_told_its_run_and_its_broker_under_every_name_asked_for() -> None:
    variables = {"A": "1", "OPENAI_BASE_URL": "x"}

    told = env.sealed(variables, run_id="r", broker_url="http://198.18.0.1:80", broker_env=("OPENAI_BASE_URL", "B"))

    assert list(told.items()) == [
        ("A", "1"),
        ("B", "http://198.18.0.1:80"),
        ("OPENAI_BASE_URL", "http://198.18.0.1:80"),
        ("SEALNET", "1"),
        ("SEALNET_BROKER_URL", "http://198.18.0.1:80"),
        ("SEALNET_RUN_ID", "r"),
    ]


def test_a_severed_payload_is_told_its_run_alone() -> None:
    assert env.sealed({}, run_id="r", broker_url=None, broker_env=()) == {"SEALNET": "1", "SEALNET_RUN_ID": "r"}


@pytest.mark.parametrize(
    ("given", "broker_env", "has_proxy", "words"),
    [
        (["SEALNET"], [], False, "--setenv SEALNET: that variable is sealnet's own"),
        ([], ["SEALNET_RUN_ID"], False, "--broker-env SEALNET_RUN_ID: that variable is sealnet's own"),
        ([], ["HTTP_PROXY"], True, "--broker-env HTTP_PROXY: an allowlist run has a proxy of its own"),
        ([], ["no_proxy"], True, "--broker-env no_proxy: an allowlist run has a proxy of its own"),
        (["https_Proxy"], [], True, "--setenv https_Proxy: an allowlist run has a proxy of its own"),
        (["X", "Y", "X"], [], False, "--setenv X twice: a variable has one value"),
        (["X"], ["X"], False, "--setenv X with --broker-env X: a variable has one value"),
    ],
)
def test_a_variable_has_one_meaning(given: list[str], broker_env: list[str], has_proxy: bool, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"cannot use {words}")):
        env.require_one_meaning(given, broker_env, has_proxy=has_proxy)


def test_variables_that_do_not_meet_are_as_they_were_asked_for() -> None:
    env.require_one_meaning(["X", "no_proxy", "SEALNET_CONFIG"], ["Y", "ANTHROPIC_BASE_URL"], has_proxy=True)
    env.require_one_meaning(["https_proxy"], ["HTTP_PROXY"], has_proxy=False)


def test_what_an_outer_run_was_told_does_not_pass() -> None:
    assert env.handed_on({"SEALNET": "1", "SEALNET_BROKER_URL": "http://198.18.0.1:1", "SEALNET_X": "1"}, ["*"]) == {"SEALNET_X": "1"}


def test_a_proxy_that_a_value_names_does_not_pass_either() -> None:
    inherited = {
        "_JAVA_OPTIONS": "-Dhttp.proxyHost=corp", "MAVEN_OPTS": "-Xmx1g -DproxySet=true", "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "http.Proxy", "GIT_CONFIG_VALUE_0": "http://corp", "JAVA_HOME": "/opt/proxyless", "GREETING": "a proxy",
    }  # fmt: skip

    assert env.handed_on(inherited, ["*"]) == {"GREETING": "a proxy"}
    plain = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "n", "JAVA_OPTS": "-Xmx1g"}
    assert env.handed_on(plain, ["*"]) == plain
