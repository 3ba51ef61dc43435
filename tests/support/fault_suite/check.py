"""What a test does with cases, on any hardware."""

from concurrent.futures import ThreadPoolExecutor

from fault_suite import runner, verdict


def problems(cases, hardware, starts, folder, record_property, beside=False):
    """Run cases; return what is wrong with each, if anything, by name.

    Args:
      cases: run one after the other in the same processes.
      hardware: where.
      starts: the processes.
      folder: for flight records.
      record_property: pytest's, which gets the reports for the table at the end.
      beside: whether each has processes of its own instead, side by side.
    """
    groups = [[case] for case in cases] if beside else [cases]
    begun = [
        runner.Begun(group, hardware, folder / str(number), starts)
        for number, group in enumerate(groups)
    ]
    with ThreadPoolExecutor(len(begun)) as threads:
        done = list(threads.map(runner.Begun.finish, begun))
    reports = [report for some in done for report in some]
    return problems_of(reports, hardware, record_property)


def problems_of(reports, hardware, record_property) -> dict[str, list[str]]:
    found = {}
    for report in reports:
        record_property("fault_report", report.to_json())
        found[str(report.case)] = verdict.problems(report, hardware)
    return {name: told for name, told in found.items() if told}
