"""Old name of `request.call_plan.CallPlan`, until all of its users have the new one."""

from midstream.runtime.frontend.request.call_plan import CallPlan as ChatPlan

__all__ = ["ChatPlan"]
