"""Faults of what belongs to one request and another one meets; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_PIPELINED = "tests/unit/server/test_pipelining.py::"
_BEHIND = _PIPELINED + "test_a_request_behind_another_one_runs_with_its_own_plan"
_RANDOM = _PIPELINED + "test_random_requests_on_one_connection_are_answered_as_on_one_of_their_own"
_OPEN = "tests/unit/server/test_open_requests.py::"

CONNECTIONS: tuple[Fault, ...] = (
    Fault(
        "A request without the field runs with the plan of the one before it on its connection",
        "Server._generate",
        "context = self.open_requests.find(params)",
        """
        context = self.open_requests.find(params)
        import contextvars
        variable = contextvars.ContextVar("kept", default=None)
        variable = globals().setdefault("_KEPT", variable)
        if context is not None:
            variable.set(context)
        context = variable.get()
        """,
        _BEHIND,
    ),
    Fault(
        "A request without the field runs with the plan of any request that is open",
        "OpenRequests.find",
        "return self._contexts.get(name) if isinstance(name, str) else None",
        """
        others = list(self._contexts.values())
        return self._contexts.get(name) or (others[0] if others else None)
        """,
        _RANDOM,
    ),
    Fault(
        "A request has the plan of the last one that had the field",
        "carry_id",
        "name = secrets.token_hex(_ID_BYTES)",
        'name = "one for all"',
        _RANDOM,
    ),
    Fault(
        "Rows and limits are those of the first client of a connection",
        "Server.begin",
        "client = self.client_of(scope)",
        """
        of = self.__dict__.setdefault("_clients", {})
        client = of.setdefault(str(scope["client"]), self.client_of(scope))
        """,
        _PIPELINED + "test_rows_belong_to_the_key_of_their_own_request",
    ),
    Fault(
        "The limit of one client is that of the next one on its connection",
        "Server.begin",
        "self.captures.reserve(client, completions_of(body))",
        'self.captures.reserve(self.__dict__.setdefault("_first", client), completions_of(body))',
        _PIPELINED
        + "test_a_limit_that_one_client_has_reached_is_not_that_of_the_next_on_its_connection",
    ),
    Fault(
        "An address that a proxy tells is that of the proxy's connection",
        "Server.client_of",
        'return client[0] if client else ""',
        'return str(Headers(scope=scope).get("host"))',
        _PIPELINED + "test_rows_belong_to_the_address_of_their_own_request_where_a_proxy_tells_it",
    ),
    Fault(
        "The id of an ended request still gives its plan",
        "OpenRequests.opened",
        "del self._contexts[name]",
        "pass",
        _OPEN + "test_the_id_of_a_request_is_of_no_use_to_another_one_nor_after_its_end",
    ),
    Fault(
        "A plan that reached no engine call is answered as if it had been carried out",
        "_check_reached",
        "if not context.calls:",
        "if False:",
        _OPEN + "test_an_answer_without_an_engine_call_of_its_plan_is_an_error",
    ),
    Fault(
        "A tracing span has the receipt of another request",
        "DelayedSpan._make",
        "_ADDED.reset(token)",
        "pass",
        "tests/unit/runtime/frontend/test_tracing.py"
        "::test_what_a_span_has_begun_makes_spans_of_its_own",
    ),
)
