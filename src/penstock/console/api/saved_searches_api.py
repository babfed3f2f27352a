"""Searches that a user has saved."""

from penstock.console.endpoints import ApiCall, endpoint
from penstock.errors import InvalidParameter

SAVED_MAX = 200


@endpoint("GET", "/saved-searches")
async def list_searches(call: ApiCall) -> object:
    """The saved searches of this user."""
    rows = await call.console.database.rows(
        "select id, name, query from saved_search where user = ? order by name", call.login.name
    )
    return {"rows": [{"id": row[0], "name": row[1], "query": row[2]} for row in rows]}


@endpoint("POST", "/saved-searches", body={"name": "name", "query": "address of the search"})
async def save(call: ApiCall) -> object:
    """Save a search under a name. A search with this name is replaced."""
    name, query = call.given("name", str).strip(), call.given("query", str)
    if not name or len(name) > 80 or len(query) > 2_000:
        raise InvalidParameter("a saved search needs a name of 1 to 80 characters")
    database, user = call.console.database, call.login.name
    saved = await database.rows("select count(*) from saved_search where user = ?", user)
    if saved[0][0] >= SAVED_MAX:
        raise InvalidParameter(f"there are {SAVED_MAX} saved searches already", hint="delete some")
    await database.change("delete from saved_search where user = ? and name = ?", user, name)
    await database.change(
        "insert into saved_search (user, name, query) values (?, ?, ?)", user, name, query
    )
    return await list_searches(call)


@endpoint("DELETE", "/saved-searches/{id}")
async def delete(call: ApiCall) -> object:
    """Delete a saved search."""
    text = call.path("id")
    if not text.isdecimal():
        raise InvalidParameter("the id is not a number")
    await call.console.database.change(
        "delete from saved_search where id = ? and user = ?", int(text), call.login.name
    )
    return await list_searches(call)
