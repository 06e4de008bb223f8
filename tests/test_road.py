"""Between `ithaka train` and its ranks, the YAML file is parsed once, and few functions are
entered."""

from count_road import walk

MAX_FUNCTIONS = 1000  # 870 when this was written; 2,305 before the road was one


def test_the_road_to_the_ranks_is_short_and_reads_the_file_once(tmp_path):
    walk(tmp_path)  # imports, and what is computed once per process
    road = walk(tmp_path)
    assert road.yaml_files == 1
    assert road.functions.total() <= MAX_FUNCTIONS, road.functions.most_common(20)
