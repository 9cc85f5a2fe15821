"""Watches: order, selectors, bookmarks, the end of the line, versions that are too old."""

from __future__ import annotations

from tests.kubernetes.conformance.client import Client, config_map, pod


async def version(api: Client, plural: str) -> str:
    found = await api.get(plural)
    return str(found.meta["resourceVersion"])


async def test_a_watch_shows_each_change_once_and_in_order(api: Client) -> None:
    begin = await version(api, "configmaps")
    await api.create("configmaps", config_map("a", {"x": "1"}))
    await api.patch("configmaps", "a", {"data": {"x": "2"}})
    # Controllers of a real cluster put one of their own into each namespace.
    async with api.watch("configmaps", resourceVersion=begin, fieldSelector="metadata.name=a") as watch:
        assert watch.status == 200
        added, modified = await watch.next(), await watch.next()
        deleted = await api.delete("configmaps", "a")
        assert deleted.status == 200
        gone = await watch.next()
        assert added is not None
        assert modified is not None
        assert gone is not None
        assert [line["type"] for line in (added, modified, gone)] == ["ADDED", "MODIFIED", "DELETED"]
        assert added["object"]["data"] == {"x": "1"}
        versions = [int(line["object"]["metadata"]["resourceVersion"]) for line in (added, modified, gone)]
        assert versions == sorted(set(versions)), "a deletion has a version of its own"
        assert gone["object"]["data"] == {"x": "2"}, "a deletion shows the last state"
        assert gone["object"]["kind"] == "ConfigMap"


async def test_a_watch_without_a_version_begins_with_what_exists(api: Client) -> None:
    await api.create("configmaps", config_map("a"))
    async with api.watch("configmaps", labelSelector="!none", fieldSelector="metadata.name=a") as watch:
        line = await watch.next()
        assert line is not None
        assert (line["type"], line["object"]["metadata"]["name"]) == ("ADDED", "a")


async def test_a_watch_ends_when_its_time_is_over(api: Client) -> None:
    begin = await version(api, "configmaps")
    async with api.watch(
        "configmaps", resourceVersion=begin, timeoutSeconds=1, fieldSelector="metadata.name=none"
    ) as watch:
        assert await watch.rest() == []


async def test_a_watch_with_bookmarks_gets_one_before_its_end(api: Client) -> None:
    """A bookmark comes only if its version is newer than what the watch began with."""
    begin = await version(api, "configmaps")
    async with api.watch(
        "configmaps", resourceVersion=begin, timeoutSeconds=5, allowWatchBookmarks=True, labelSelector="none=none"
    ) as watch:
        made = await api.create("configmaps", config_map("a"))
        lines = await watch.rest()
    assert {line["type"] for line in lines} == {"BOOKMARK"}
    last = lines[-1]["object"]
    assert last["kind"] == "ConfigMap"
    assert int(last["metadata"]["resourceVersion"]) >= int(made.meta["resourceVersion"])
    assert "name" not in last["metadata"]


async def test_an_object_that_begins_to_fit_is_added_and_one_that_stops_is_deleted(api: Client) -> None:
    begin = await version(api, "configmaps")
    async with api.watch("configmaps", resourceVersion=begin, labelSelector="on=yes") as watch:
        await api.create("configmaps", config_map("a", {"x": "1"}))
        await api.patch("configmaps", "a", {"metadata": {"labels": {"on": "yes"}}})
        added = await watch.next()
        await api.patch("configmaps", "a", {"metadata": {"labels": {"on": "no"}}, "data": {"x": "2"}})
        deleted = await watch.next()
        assert added is not None
        assert deleted is not None
        assert (added["type"], deleted["type"]) == ("ADDED", "DELETED")
        assert deleted["object"]["data"] == {"x": "1"}, "the line shows the last state that fitted"
        now = await api.get("configmaps", "a")
        assert deleted["object"]["metadata"]["resourceVersion"] == now.meta["resourceVersion"]


async def test_a_watch_of_fields_follows_phases(api: Client) -> None:
    begin = await version(api, "pods")
    async with api.watch("pods", resourceVersion=begin, fieldSelector="status.phase=Running") as watch:
        await api.create("pods", pod("a"))
        await api.patch("pods", "a", {"status": {"phase": "Running"}}, sub="status")
        line = await watch.next()
        assert line is not None
        assert (line["type"], line["object"]["status"]["phase"]) == ("ADDED", "Running")


async def test_a_watch_from_a_version_that_is_too_old_ends_with_an_error_line(api: Client, jobs: str) -> None:
    """A custom resource has no history before its definition."""
    async with api.watch(jobs, resourceVersion="1") as watch:
        assert watch.status == 200, "the refusal comes inside the stream"
        line = await watch.next()
        assert line is not None
        assert line["type"] == "ERROR"
        status = line["object"]
        assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")
        assert status["message"].startswith("too old resource version: 1")
        assert await watch.next() is None


async def test_a_watch_goes_on_from_the_version_of_a_bookmark(api: Client) -> None:
    begin = await version(api, "configmaps")
    async with api.watch("configmaps", resourceVersion=begin, timeoutSeconds=5, allowWatchBookmarks=True) as watch:
        await api.create("configmaps", config_map("first"))
        mark = (await watch.until("BOOKMARK"))["object"]["metadata"]["resourceVersion"]
    await api.create("configmaps", config_map("later"))
    async with api.watch("configmaps", resourceVersion=mark) as watch:
        line = await watch.next()
        assert line is not None
        assert (line["type"], line["object"]["metadata"]["name"]) == ("ADDED", "later")


async def test_a_change_that_changes_nothing_makes_no_line(api: Client) -> None:
    await api.create("configmaps", config_map("a", {"x": "1"}))
    begin = await version(api, "configmaps")
    async with api.watch("configmaps", resourceVersion=begin) as watch:
        await api.patch("configmaps", "a", {"data": {"x": "1"}})
        await api.patch("configmaps", "a", {"data": {"x": "2"}})
        line = await watch.next()
        assert line is not None
        assert line["object"]["data"] == {"x": "2"}


async def test_a_match_is_not_allowed_in_a_watch(api: Client) -> None:
    answer = await api.get("configmaps", watch=True, resourceVersion="1", resourceVersionMatch="Exact")
    assert answer.status == 422
