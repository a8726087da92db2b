"""Faults of what belongs to one request and another one meets; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_PIPELINED = "tests/unit/server/test_pipelining.py::"
_BEHIND = _PIPELINED + "test_a_request_behind_another_one_runs_with_its_own_plan"
_RANDOM = _PIPELINED + "test_random_requests_on_one_connection_are_answered_as_on_one_of_their_own"
_OPEN = "tests/unit/server/test_open_requests.py::"
_FIND = "        context = self.open_requests.find(params)\n"
_KEPT_IN_CONTEXT = (
    "        import contextvars\n"
    "        variable = contextvars.ContextVar('kept', default=None)\n"
    "        variable = globals().setdefault('_KEPT', variable)\n"
    "        if context is not None:\n"
    "            variable.set(context)\n"
    "        context = variable.get()\n"
)

CONNECTIONS: tuple[Fault, ...] = (
    Fault(
        "A request without the field runs with the plan of the one before it on its connection",
        "server/server.py",
        _FIND,
        _FIND + _KEPT_IN_CONTEXT,
        _BEHIND,
    ),
    Fault(
        "A request without the field runs with the plan of any request that is open",
        "server/open_requests.py",
        "        return self._contexts.get(name) if isinstance(name, str) else None\n",
        "        others = list(self._contexts.values())\n"
        "        return self._contexts.get(name) or (others[0] if others else None)\n",
        _RANDOM,
    ),
    Fault(
        "A request has the plan of the last one that had the field",
        "server/open_requests.py",
        "    name = secrets.token_hex(_ID_BYTES)\n",
        '    name = "one for all"\n',
        _RANDOM,
    ),
    Fault(
        "Rows and limits are those of the first client of a connection",
        "server/server.py",
        "        client = self.client_of(scope)\n        plan = ",
        "        of = self.__dict__.setdefault('_clients', {})\n"
        "        client = of.setdefault(str(scope['client']), self.client_of(scope))\n"
        "        plan = ",
        _PIPELINED + "test_rows_belong_to_the_key_of_their_own_request",
    ),
    Fault(
        "The limit of one client is that of the next one on its connection",
        "server/server.py",
        "self.captures.reserve(client, completions_of(body))\n",
        "self.captures.reserve(\n"
        "                self.__dict__.setdefault('_first', client), completions_of(body)\n"
        "            )\n",
        _PIPELINED
        + "test_a_limit_that_one_client_has_reached_is_not_that_of_the_next_on_its_connection",
    ),
    Fault(
        "An address that a proxy tells is that of the proxy's connection",
        "server/server.py",
        '        return client[0] if client else ""\n',
        '        return str(Headers(scope=scope).get("host"))\n',
        _PIPELINED + "test_rows_belong_to_the_address_of_their_own_request_where_a_proxy_tells_it",
    ),
    Fault(
        "The id of an ended request still gives its plan",
        "server/open_requests.py",
        "            del self._contexts[name]\n",
        "            pass\n",
        _OPEN + "test_the_id_of_a_request_is_of_no_use_to_another_one_nor_after_its_end",
    ),
    Fault(
        "A plan that reached no engine call is answered as if it had been carried out",
        "server/response_writer.py",
        "    if not context.calls:\n",
        "    if False:\n",
        _OPEN + "test_an_answer_without_an_engine_call_of_its_plan_is_an_error",
    ),
    Fault(
        "A tracing span has the receipt of another request",
        "runtime/frontend/tracing.py",
        "            _ADDED.reset(token)\n",
        "            pass\n",
        "tests/unit/runtime/frontend/test_tracing.py"
        "::test_what_a_span_has_begun_makes_spans_of_its_own",
    ),
)
