"""Why a group does not consume: gathering, facts, decision."""
