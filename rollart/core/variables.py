"""Which environment variables reach foreign code: environments, agents, rewards, and what they start.

The environment of the controller has secrets in it: keys of clouds, of judges, of other runs. Foreign code gets what a
program needs to run at all, and what the run file names in `pass_env`; values are never written down. Standard library
only.
"""

from collections.abc import Iterable, Mapping

PREFIXES = ("LC_", "PYTHON", "XDG_", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "MUJOCO_", "TESSDATA_")
_GROUPS = {
    "user and machine": "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM COLUMNS LINES TMPDIR TEMP TMP HOSTNAME",
    "libraries": "LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV CONDA_PREFIX JAVA_HOME NODE_PATH MALLOC_ARENA_MAX",
    # No proxy: its URL may have a password in it.
    "certificates": "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NO_PROXY no_proxy",
    "caches": "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE HF_ENDPOINT "
    "TRANSFORMERS_OFFLINE NUMBA_CACHE_DIR ALFWORLD_DATA ROLLART_ENVS",
    "containers": "CONTAINERS_CONF CONTAINERS_STORAGE_CONF CONTAINERS_REGISTRIES_CONF",
    "no display": "PYOPENGL_PLATFORM SDL_VIDEODRIVER SDL_AUDIODRIVER",
}
NAMES = frozenset(name for group in _GROUPS.values() for name in group.split())


class MissingVariables(Exception):
    """The message ends a sentence that begins with what should be started."""


def passed(variables: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The allowed ones of `variables`, and those with the `names` of the run file. Raises MissingVariables."""
    missing = [name for name in names if name not in variables]
    if missing:
        raise MissingVariables(f"`pass_env` names {', '.join(missing)}, which is not set on this machine")
    wanted = {*NAMES, *names}
    return {name: value for name, value in variables.items() if name in wanted or name.startswith(PREFIXES)}
