"`course plan`: the lessons' minutes by part, and how they fall into days."

from course_lib.authoring import catalogue, notebook
from course_lib.authoring.notebook import CourseError


def plan_cmd(args):
    "Print the minutes of the lessons, all or the given ones, by part, and a plan for each count of days."
    if min(args.days) < 1 or not 0 < args.hours <= 24:
        raise CourseError("a plan needs one day or more, and up to 24 hours a day")
    known = catalogue.published()
    numbers = sorted({notebook.resolve(w) for w in args.lessons} or known)
    if drafts := [n for n in numbers if n not in known]:
        raise CourseError(f"lesson {drafts[0]} is a draft: it has no recording, and is in no plan")
    parts, minutes = {}, {}
    for n in numbers:
        about = known[n][1]["metadata"]["course"]
        parts.setdefault(about["part"], []).append(n)
        minutes[n] = about["minutes"]
    for part, found in parts.items():
        print(f"{part}: {sum(minutes[n] for n in found)} min")
        for n in found:
            print(f"  {n}  {known[n][1]['metadata']['course']['title']}, {minutes[n]} min")
    print(f"\n{sum(minutes.values())} min in all: reading, exercises and runs, without breaks.")
    for days in args.days:
        print(f"\n{days} day{'s' * (days > 1)} of {args.hours:g} h")
        chosen = choose(list(parts.values()), minutes, days, args.hours * 60)
        for i, day in enumerate(spread(chosen, minutes, days, args.hours * 60) or []):
            names = ", ".join(known[n][0].stem for n in day)
            print(f"  day {i + 1}  {sum(minutes[n] for n in day):>4} min  {names}")
        if left := [known[n][0].stem for n in numbers if n not in chosen]:
            print("  one lesson of each part in turn, from its beginning, until the next does not fit")
            print(f"  left out: {', '.join(left)}")


def choose(parts, minutes, days, limit):
    "As many lessons as fit: the first of each part, then the second of each, until one does not fit."
    chosen = []
    for n in (part[i] for i in range(max(map(len, parts), default=0)) for part in parts if i < len(part)):
        if spread(sorted([*chosen, n]), minutes, days, limit) is None:
            break
        chosen = sorted([*chosen, n])
    return chosen


def spread(lessons, minutes, days, limit):
    "The lessons in their order as `days` lists or fewer, the longest as short as can be; None: over `limit`."
    for most in range(max((minutes[n] for n in lessons), default=0), int(limit) + 1):
        found = [[]]
        for n in lessons:
            if sum(minutes[m] for m in found[-1]) + minutes[n] > most:
                found.append([])
            found[-1].append(n)
        if len(found) <= days:
            return found
    return None
