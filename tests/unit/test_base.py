"""What a pass declares is collected from its class."""

from ascend_opt import Pass, host_patch, traced_patch


class Two(Pass):
    """Do two things.

    And more.
    """

    @host_patch("m:f", known={"a": "b"}, optional=True, redo=False, leave=frozenset({"c"}))
    def first(self, wrapped, instance, args, kwargs):
        pass

    @traced_patch("m:C.g", known={})
    def second(self, original):
        pass


def test_patches_are_collected_in_the_order_of_their_methods():
    """Target, kind, method and options, as they were written."""
    first, second = Two.patches

    assert (str(first.target), first.kind, first.method) == ("m:f", "host", "first")
    assert (first.known, first.leave) == ({"a": "b"}, {"c"})
    assert (first.optional, first.redo) == (True, False)
    assert (str(second.target), second.kind, second.redo) == ("m:C.g", "traced", False)


def test_a_subclass_inherits_patches():
    """And adds its own."""

    class Three(Two):
        @host_patch("m:h", known={})
        def third(self, wrapped, instance, args, kwargs):
            pass

    assert [patch.method for patch in Three.patches] == ["first", "second", "third"]


def test_an_overridden_patch_replaces_the_inherited_one():
    """It is one patch with the new target, not two; set to None, it is none."""

    class Other(Two):
        @host_patch("m:other", known={})
        def first(self, wrapped, instance, args, kwargs):
            pass

        second = None

    assert [str(patch.target) for patch in Other.patches] == ["m:other"]


def test_an_override_without_a_mark_keeps_the_target():
    """The patch is not silently lost: the new method does the work."""

    class Other(Two):
        def first(self, wrapped, instance, args, kwargs):
            pass

    assert [patch.target for patch in Other.patches] == [patch.target for patch in Two.patches]


def test_the_summary_is_the_first_line():
    """Of the docstring."""
    assert Two.summary() == "Do two things."


def test_only_the_first_failure_is_kept():
    """Later ones are its consequences."""
    instance = Two()
    instance.fail("first")
    instance.fail("second")

    assert instance.failure == "first"


def test_instances_share_nothing():
    """Counters, variants and failures are one instance's own."""
    one, two = Two(), Two()
    one.counters["steps"] += 1
    one.variants["m:f"] = "b"
    one.fail("x")

    assert (two.counters, two.variants, two.failure) == ({}, {}, None)
