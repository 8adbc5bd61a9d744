"""Pages of the console. A handler calls what the API's route of the same thing calls, with the same tenant, and renders the result."""
